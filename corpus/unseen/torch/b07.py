#!/usr/bin/env python
"""Quantile regression of flat prices (euros) with a linear model, full batch."""
import argparse
import torch
from torch import nn


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=1500)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--alpha", type=float, default=0.9)
    ap.add_argument("--quantiles", type=float, nargs="+", default=[0.1, 0.5, 0.9])
    ap.add_argument("--seed", type=int, default=9)
    return ap.parse_args()


def make_flats(n):
    area = 25 + 120 * torch.rand(n)
    rooms = (area / 25).floor().clamp(1, 5)
    dist = 12 * torch.rand(n)
    price = 40e3 + 3100 * area + 12e3 * rooms - 6e3 * dist
    price = price * (1 + 0.15 * torch.randn(n)).clamp(0.6, 1.5)
    x = torch.stack([(area - 85) / 35, (rooms - 3) / 1.2, (dist - 6) / 3.5], dim=1)
    return x, price.unsqueeze(1)


class LinearQuantiles(nn.Module):
    def __init__(self, q):
        super().__init__()
        self.lin = nn.Linear(3, q)

    def forward(self, x):
        return self.lin(x)


def pinball(pred, y, taus):
    err = y - pred
    return torch.maximum(taus * err, (taus - 1) * err).mean()


def main(a):
    torch.manual_seed(a.seed)
    x, y = make_flats(400)
    taus = torch.tensor(a.quantiles)
    net = LinearQuantiles(len(taus))
    opt = torch.optim.RMSprop(net.parameters(), lr=a.lr, alpha=a.alpha, centered=True)
    for it in range(a.steps):
        loss = pinball(net(x), y, taus)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 100 == 0 or it < 200 and it % 20 == 0:
            with torch.no_grad():
                cover = (y < net(x)).float().mean(0).tolist()
            print(f"step {it:5d} pinball {loss.item():9.4f} coverage {[round(c, 2) for c in cover]}")


if __name__ == "__main__":
    main(parse())
