import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Quantizer(nn.Module):
    def __init__(self, n_codes=64, dim=8, beta=0.25):
        super().__init__()
        self.codes = nn.Embedding(n_codes, dim)
        nn.init.normal_(self.codes.weight, std=0.5)
        self.beta = beta

    def forward(self, z):
        d = torch.cdist(z.reshape(-1, z.shape[-1]), self.codes.weight)
        idx = d.argmin(dim=1).view(z.shape[:-1])
        q = self.codes(idx)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss, idx


class VQ(nn.Module):
    def __init__(self, groups=8, dim=8):
        super().__init__()
        self.groups, self.dim = groups, dim
        self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, groups * dim),
                                 nn.LayerNorm(groups * dim, elementwise_affine=False))
        self.q = Quantizer(64, dim)
        self.dec = nn.Sequential(nn.Linear(groups * dim, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        z = self.enc(x).view(-1, self.groups, self.dim)
        q, loss, idx = self.q(z)
        return self.dec(q.flatten(1)), loss, idx


def main():
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    mean = x.mean(0)
    train, test = x[:1500] - mean, x[1500:] - mean
    model = VQ()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.99))
    sched = torch.optim.lr_scheduler.CyclicLR(opt, base_lr=1e-4, max_lr=4e-3, step_size_up=40,
                                              mode="triangular", cycle_momentum=False)
    scale = train.var()
    for step in range(360):
        xb = train[torch.randint(0, len(train), (128,))]
        rec, commit, idx = model(xb)
        mse = F.mse_loss(rec, xb) / scale
        loss = mse + commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 40 == 0 or step == 359:
            print(f"step {step:3d} rec {mse.item():.4f} vq {commit.item():.4f} "
                  f"codes in use {idx.unique().numel()} lr {sched.get_last_lr()[0]:.1e}")
    with torch.no_grad():
        rec, _, _ = model(test)
        print("test relative mse", round((F.mse_loss(rec, test) / scale).item(), 4))


if __name__ == "__main__":
    main()
