import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class PriceNet(nn.Module):
    def __init__(self, d, mean, std):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 96), nn.SiLU(), nn.LayerNorm(96),
                                  nn.Linear(96, 96), nn.SiLU(), nn.LayerNorm(96),
                                  nn.Linear(96, 1))
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x):
        return self.body(x).squeeze(-1)

    def price(self, x):
        return self(x).float() * self.std + self.mean


def houses(n, seed):
    rng = np.random.default_rng(seed)
    area = rng.uniform(40, 300, n)
    year = rng.integers(1900, 2020, n)
    dist = rng.exponential(8.0, n)
    rooms = np.clip((area / 30 + rng.normal(0, 1, n)).round(), 1, 12)
    price = 2500 * area * np.exp(-dist / 20) + 900 * (year - 1900) + 15000 * rooms
    price = price * rng.lognormal(0, 0.05, n)
    return np.stack([area, year, dist, rooms], 1), price


def main():
    torch.manual_seed(0)
    xtr, ytr = houses(4096, 0)
    xte, yte = houses(1000, 1)
    mu, sd = xtr.mean(0), xtr.std(0)
    as_t = lambda a: torch.tensor(a, dtype=torch.float32)
    xtr, xte = as_t((xtr - mu) / sd), as_t((xte - mu) / sd)
    ytr, yte = as_t(ytr), as_t(yte)

    model = PriceNet(4, ytr.mean().item(), ytr.std().item())
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    accumulate = 4
    total = 10 * 4096 // (32 * accumulate)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, total_steps=total)
    loader = DataLoader(TensorDataset(xtr, ytr), batch_size=32, shuffle=True, drop_last=True)
    for epoch in range(10):
        shown = 0.0
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pred = model(x)
            loss = F.smooth_l1_loss(pred.float(), (y - model.mean) / model.std)
            (loss / accumulate).backward()
            shown += loss.item()
            if (i + 1) % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
                sched.step()
        with torch.no_grad():
            rmse = (model.price(xte) - yte).pow(2).mean().sqrt().item()
        print(f"epoch {epoch} loss {shown / len(loader):.4f} rmse {rmse:,.0f} "
              f"of std {yte.std().item():,.0f}")


if __name__ == "__main__":
    main()
