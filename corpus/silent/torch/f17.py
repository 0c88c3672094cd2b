import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        nn.init.zeros_(self.fc2.weight)
        nn.init.zeros_(self.fc2.bias)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(x)))


class ResMLP(nn.Module):
    def __init__(self, width=64, depth=24):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(F.relu(self.blocks(self.stem(x))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--warmup", type=int, default=60)
    ap.add_argument("--peak", type=float, default=1.5e-3)
    args = ap.parse_args()
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32) / 16 - 0.3
    y = torch.tensor(d.target)
    net = ResMLP()
    opt = torch.optim.AdamW(net.parameters(), lr=args.peak, weight_decay=0.01)

    def factor(s):
        if s < args.warmup:
            return s / args.warmup
        return max(0.02, (args.steps - s) / (args.steps - args.warmup))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    for s in range(args.steps):
        i = torch.randint(0, 1400, (96,))
        loss = F.cross_entropy(net(x[i]), y[i])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 20 == 0:
            print(f"{s:4d} lr {sched.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
        sched.step()
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"held-out accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
