"""Deep plain tanh network on the 8x8 digits."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class PlainNet(nn.Module):
    def __init__(self, depth=14, width=96, n_in=64, n_out=10):
        super().__init__()
        dims = [n_in] + [width] * depth
        self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))
        self.out = nn.Linear(width, n_out)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        for b in self.blocks:
            x = torch.tanh(b(x))
        return self.out(x)


def accuracy(net, x, y):
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--seed", type=int, default=3)
    args = ap.parse_args()
    torch.manual_seed(args.seed)

    X, y = load_digits(return_X_y=True)
    X = (X - X.mean()) / X.std()
    xtr, xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0, stratify=y)
    xtr, xte = torch.tensor(xtr, dtype=torch.float32), torch.tensor(xte, dtype=torch.float32)
    ytr, yte = torch.tensor(ytr), torch.tensor(yte)

    net = PlainNet()
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    for epoch in range(args.epochs):
        perm = torch.randperm(len(xtr))
        total = 0.0
        for i in range(0, len(perm), args.batch_size):
            idx = perm[i:i + args.batch_size]
            loss = F.cross_entropy(net(xtr[idx]), ytr[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(idx)
        print(f"epoch {epoch:2d}  train loss {total / len(perm):.4f}  test acc {accuracy(net, xte, yte):.3f}")
    print("final metric: test acc %.4f" % accuracy(net, xte, yte))


if __name__ == "__main__":
    main()
