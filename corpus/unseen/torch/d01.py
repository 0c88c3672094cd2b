import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(3)


class Codebook(nn.Module):
    """codes are moved by an exponential moving average, not by the optimizer"""

    def __init__(self, n_codes=64, dim=8, decay=0.9):
        super().__init__()
        self.n_codes, self.dim, self.decay = n_codes, dim, decay
        self.register_buffer("embed", torch.randn(n_codes, dim) * 0.5)
        self.register_buffer("cluster_size", torch.zeros(n_codes))
        self.register_buffer("embed_avg", torch.zeros(n_codes, dim))

    def forward(self, z):
        flat = z.reshape(-1, self.dim)
        d = (flat ** 2).sum(1, keepdim=True) - 2 * flat @ self.embed.t() + (self.embed ** 2).sum(1)
        idx = d.argmin(1)
        q = self.embed[idx].view_as(z)
        if self.training:
            onehot = F.one_hot(idx, self.n_codes).type_as(flat)
            with torch.no_grad():
                self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(onehot.t() @ flat, alpha=1 - self.decay)
        commit = F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return q, commit, idx.view(z.shape[:-1])

    @torch.no_grad()
    def refresh(self):
        self.embed.copy_(self.embed_avg / self.cluster_size.unsqueeze(1))


class VQVAE(nn.Module):
    def __init__(self, n_tok=4, dim=8):
        super().__init__()
        self.n_tok, self.dim = n_tok, dim
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, n_tok * dim))
        self.vq = Codebook(dim=dim)
        self.dec = nn.Sequential(nn.Linear(n_tok * dim, 96), nn.ReLU(), nn.Linear(96, 64), nn.Sigmoid())

    def forward(self, x):
        z = self.enc(x).view(-1, self.n_tok, self.dim)
        q, commit, idx = self.vq(z)
        return self.dec(q.flatten(1)), commit, idx


X = torch.tensor(load_digits().data / 16.0, dtype=torch.float32)
train, test = X[:1400], X[1400:]
loader = DataLoader(TensorDataset(train), batch_size=100, shuffle=True)

net = VQVAE()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
step = 0
for epoch in range(4):
    net.train()
    for (xb,) in loader:
        rec, commit, _ = net(xb)
        loss = F.mse_loss(rec, xb) + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} commit {commit.item():.4f}")
        step += 1
    net.eval()
    with torch.no_grad():
        rec, _, idx = net(test)
        used = idx.unique().numel()
        print(f"epoch {epoch} test mse {F.mse_loss(rec, test).item():.4f} codes in use {used}")
    net.vq.refresh()
