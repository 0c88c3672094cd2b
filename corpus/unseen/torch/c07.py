"""image retrieval on digits: conv trunk + generalised mean pooling + contrastive (in-batch softmax) loss"""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

SEED, DIM, STEPS = 13, 32, 40
torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)


class GeM(nn.Module):
    def __init__(self, p=3.0):
        super().__init__()
        self.p = nn.Parameter(torch.ones(1) * p)

    def forward(self, x):
        return x.pow(self.p).mean(dim=(-2, -1)).pow(1.0 / self.p)

    def __repr__(self):
        return f"GeM(p={self.p.item():.3f})"


class Trunk(nn.Module):
    def __init__(self, chans=(16, 32, 48)):
        super().__init__()
        layers, cin = [], 1
        for c in chans:
            layers += [nn.Conv2d(cin, c, 3, padding=1), nn.ReLU(inplace=True)]
            cin = c
        layers.insert(4, nn.MaxPool2d(2))
        self.conv = nn.Sequential(*layers)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight)
                nn.init.constant_(m.bias, 0.05)

    def forward(self, x):
        return self.conv(x)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.pool = Trunk(), GeM()
        self.whiten = nn.Linear(48, DIM)

    def forward(self, x):
        return F.normalize(self.whiten(self.pool(self.trunk(x))), dim=-1)


def pair_batch(X, by_class, n=4):
    a, b = [], []
    for c in range(10):
        pick = rng.choice(by_class[c], size=2 * n, replace=False)
        a += list(pick[:n])
        b += list(pick[n:])
    lab = torch.arange(10).repeat_interleave(n)
    return X[a], X[b], lab


def recall_at_1(model, X, y):
    with torch.no_grad():
        e = model(X)
    sim = e @ e.t()
    sim.fill_diagonal_(-2)
    return (y[sim.argmax(1)] == y).float().mean().item()


imgs, y = load_digits(return_X_y=True)
X = torch.tensor(imgs / 8.0 - 1.0, dtype=torch.float32).view(-1, 1, 8, 8)
y = torch.tensor(y)
train, test = torch.arange(1200), torch.arange(1200, len(y))
by_class = [np.flatnonzero(y[train].numpy() == c) for c in range(10)]

model = Retrieval()
opt = torch.optim.Adam([{"params": model.trunk.parameters(), "lr": 2e-3},
                        {"params": model.whiten.parameters(), "lr": 2e-3},
                        {"params": model.pool.parameters(), "lr": 1e-2}])
for step in range(STEPS):
    xa, xb, lab = pair_batch(X, by_class)
    logits = model(xa) @ model(xb).t() / 0.1
    target = (lab[:, None] == lab[None, :]).float()
    target = target / target.sum(1, keepdim=True)
    loss = -(target * logits.log_softmax(1)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 0:
        print(f"{step:3d} loss {loss.item():.4f} R@1 {recall_at_1(model, X[test], y[test]):.3f} {model.pool}")
