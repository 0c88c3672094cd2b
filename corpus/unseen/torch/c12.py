import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(17)
np.random.seed(17)


def get_arrays():
    X, y = load_digits(return_X_y=True)
    X = torch.tensor(X / 16.0, dtype=torch.float32)
    y = torch.tensor(y)
    return X, y


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return self.net(x)


class ArcMargin(nn.Module):
    """additive angular margin, without arccos"""

    def __init__(self, dim, n_cls, s=16.0, m=0.25):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_cls, dim))
        nn.init.xavier_uniform_(self.weight)
        self.s = s
        self.cos_m, self.sin_m = np.cos(m), np.sin(m)
        self.th, self.mm = np.cos(np.pi - m), np.sin(np.pi - m) * m

    def forward(self, feat, label):
        cosine = F.linear(F.normalize(feat), F.normalize(self.weight))
        sine = torch.sqrt(1.0 - cosine.pow(2))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        hot = F.one_hot(label, cosine.size(1)).bool()
        return self.s * torch.where(hot, phi, cosine)

    @torch.no_grad()
    def add_class(self, proto):
        self.weight = nn.Parameter(torch.cat([self.weight, F.normalize(proto, dim=-1)]))


def epoch_batches(idx, bs):
    idx = idx[torch.randperm(len(idx))]
    return idx.split(bs)


def evaluate(enc, head, X, y):
    with torch.no_grad():
        cos = F.normalize(enc(X)) @ F.normalize(head.weight).t()
    return (cos.argmax(1) == y).float().mean().item()


X, y = get_arrays()
base = torch.nonzero(y[:1000] < 8).flatten()
novel_shot = {c: torch.nonzero(y[:1000] == c).flatten()[:1] for c in (8, 9)}
test = torch.arange(1000, len(y))

enc, head = Encoder(), ArcMargin(16, 8)
opt = torch.optim.Adam(list(enc.parameters()) + list(head.parameters()), lr=3e-3)
print("--- base classes")
for ep in range(3):
    for b in epoch_batches(base, 64):
        loss = F.cross_entropy(head(enc(X[b]), y[b]), y[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
    ok = test[y[test] < 8]
    print(f"epoch {ep} loss {loss.item():.3f} acc {evaluate(enc, head, X[ok], y[ok]):.3f}")

print("--- one shot classes, prototypes as new rows of the head")
for c, k in novel_shot.items():
    head.add_class(enc(X[k]).detach())
print(f"imprinted acc {evaluate(enc, head, X[test], y[test]):.3f}")
opt = torch.optim.Adam(list(enc.parameters()) + list(head.parameters()), lr=1e-3)
shots = torch.cat(list(novel_shot.values()))
for it in range(12):
    b = torch.cat([base[torch.randint(len(base), (40,))], shots])
    loss = F.cross_entropy(head(enc(X[b]), y[b]), y[b])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 3 == 0:
        print(f"tune {it} loss {loss.item():.3f} acc {evaluate(enc, head, X[test], y[test]):.3f}")
