import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Quantizer(nn.Module):
    def __init__(self, n_codes, dim, beta=0.25):
        super().__init__()
        self.codes = nn.Embedding(n_codes, dim)
        nn.init.normal_(self.codes.weight, std=0.5)
        self.beta = beta

    def forward(self, z):
        b, p, d = z.shape
        flat = z.reshape(-1, d)
        dist = torch.cdist(flat, self.codes.weight)
        idx = dist.argmin(1)
        q = self.codes(idx).view(b, p, d)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        return q, loss, idx


class VQAE(nn.Module):
    def __init__(self, n_codes=64, dim=8, parts=8):
        super().__init__()
        self.parts, self.dim = parts, dim
        self.enc = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, parts * dim))
        self.vq = Quantizer(n_codes, dim)
        self.dec = nn.Sequential(nn.Linear(parts * dim, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x):
        z = self.enc(x).view(-1, self.parts, self.dim)
        q, vq_loss, idx = self.vq(z)
        return self.dec(q.flatten(1)), vq_loss, idx


def main():
    torch.manual_seed(2)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    x = x[torch.randperm(len(x))]
    xt, xv = x[:1500], x[1500:]
    model = VQAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(400):
        xb = xt[torch.randint(0, len(xt), (128,))]
        rec, vq_loss, idx = model(xb)
        rec_loss = F.mse_loss(rec, xb)
        loss = rec_loss + vq_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0 or step == 399:
            print(f"step {step:3d} rec {rec_loss.item():.4f} vq {vq_loss.item():.4f} "
                  f"codes used {idx.unique().numel()}")
    with torch.no_grad():
        rec, _, idx = model(xv)
        base = (xv - xt.mean(0)).pow(2).mean()
        print(f"FINAL valid mse {F.mse_loss(rec, xv).item():.4f} (mean image {base.item():.4f})")


main()
