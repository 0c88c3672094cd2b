import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(3)


class Quantizer(nn.Module):
    def __init__(self, n_codes=64, dim=8, beta=0.25):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(n_codes, dim) * 0.1)
        self.beta = beta

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        dist = torch.cdist(flat, self.codes)
        idx = dist.argmin(1)
        q = self.codes[idx].view_as(z)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss, idx


class VQAutoencoder(nn.Module):
    def __init__(self, parts=8, dim=8):
        super().__init__()
        self.parts, self.dim = parts, dim
        self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, parts * dim))
        self.vq = Quantizer(dim=dim)
        self.dec = nn.Sequential(nn.Linear(parts * dim, 128), nn.ReLU(), nn.Linear(128, 64))

    def encode(self, x):
        return self.enc(x).view(-1, self.parts, self.dim)

    def forward(self, x):
        q, vq_loss, idx = self.vq(self.encode(x))
        return self.dec(q.flatten(1)), vq_loss, idx


data = torch.tensor(load_digits().data, dtype=torch.float32) / 16.0
model = VQAutoencoder()
with torch.no_grad():
    start = model.encode(data).reshape(-1, model.dim)
    model.vq.codes.copy_(start[torch.randperm(len(start))[:64]])

opt = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(400):
    x = data[torch.randint(0, len(data), (128,))]
    rec, vq_loss, idx = model(x)
    rec_loss = F.mse_loss(rec, x)
    loss = rec_loss + vq_loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(f"{step:4d} rec {rec_loss.item():.4f} vq {vq_loss.item():.4f} codes used {idx.unique().numel()}")

with torch.no_grad():
    rec, _, idx = model(data)
    base = ((data - data.mean(0)) ** 2).mean()
    print(f"final reconstruction {F.mse_loss(rec, data).item():.4f}  (mean image {base.item():.4f})")
