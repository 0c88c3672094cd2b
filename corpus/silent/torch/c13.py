"""Two-layer GCN on a stochastic block model with noisy node features."""
import argparse
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def sbm(n=300, k=4, p_in=0.10, p_out=0.015, d=16, seed=0):
    r = np.random.RandomState(seed)
    y = r.randint(0, k, n)
    P = np.where(y[:, None] == y[None], p_in, p_out)
    A = np.triu(r.rand(n, n) < P, 1)
    A = (A | A.T).astype(np.float32) + np.eye(n, dtype=np.float32)
    dinv = 1 / np.sqrt(A.sum(1))
    A = dinv[:, None] * A * dinv[None]
    centers = r.randn(k, d)
    X = (centers[y] * 0.6 + r.randn(n, d)).astype(np.float32)
    return torch.from_numpy(A), torch.from_numpy(X), torch.from_numpy(y).long()


class GCN(nn.Module):
    def __init__(self, d, h, k):
        super().__init__()
        self.w1 = nn.Linear(d, h)
        self.w2 = nn.Linear(h, k)

    def forward(self, A, X):
        h = F.relu(self.w1(A @ X))
        return self.w2(A @ h)


def train(args):
    torch.manual_seed(args.seed)
    A, X, y = sbm()
    idx = torch.randperm(len(y))
    train_idx, test_idx = idx[:100], idx[100:]
    model = GCN(X.shape[1], 32, 4)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=args.decay_every, gamma=0.1)

    for epoch in range(args.epochs):
        for chunk in train_idx.split(20):
            out = model(A, X)
            loss = F.cross_entropy(out[chunk], y[chunk])
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
        if epoch % 5 == 0:
            acc = (model(A, X)[test_idx].argmax(1) == y[test_idx]).float().mean()
            print(f"epoch {epoch:3d} loss {loss.item():.4f} test acc {acc:.3f}")

    with torch.no_grad():
        out = model(A, X)
        print("final metric: train loss %.4f, test acc %.4f" % (
            F.cross_entropy(out[train_idx], y[train_idx]),
            (out[test_idx].argmax(1) == y[test_idx]).float().mean()))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--decay-every", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    train(p.parse_args())
