import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.utils.data import TensorDataset, DataLoader

"""
Multi target regression on the diabetes table. Three targets are measured per patient,
the lab value (target 2) is taken only for the later patients of the study, the others are NaN.
"""


def prepare(seed=1):
    rs = np.random.RandomState(seed)
    X, prog = load_diabetes(return_X_y=True)
    X = X * 20
    prog = (prog - prog.mean()) / prog.std()
    bp = X[:, 3] * 0.8 + 0.1 * rs.randn(len(X))
    lab = 0.6 * X[:, 8] - 0.3 * X[:, 2] + 0.2 * rs.randn(len(X))
    Y = np.stack([prog, bp, lab], 1)
    hole = rs.rand(*Y.shape) < 0.02
    hole[:150] = False
    hole[150:170, 2] = True
    Y[hole] = np.nan
    return torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)


class MultiHead(nn.Module):
    def __init__(self, din, heads=3, hid=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(din, hid), nn.SiLU(), nn.LayerNorm(hid), nn.Linear(hid, hid), nn.SiLU())
        self.heads = nn.ModuleList(nn.Linear(hid, 1) for _ in range(heads))

    def forward(self, x):
        z = self.body(x)
        return torch.cat([h(z) for h in self.heads], 1)


class MaskedMSE(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, pred, target):
        missing = torch.isnan(target)
        sq = (pred - target) ** 2
        sq = torch.where(missing, torch.zeros_like(sq), sq)
        per_head = sq.sum(0) / (~missing).sum(0).clamp(min=1)
        return (per_head * self.weights).sum()


def check(loss, step):
    if torch.isnan(loss):
        raise FloatingPointError(f"step {step}: loss is nan")


def score(model, X, Y):
    model.eval()
    with torch.no_grad():
        P = model(X)
    model.train()
    out = []
    for k in range(Y.shape[1]):
        ok = ~torch.isnan(Y[:, k])
        r = ((P[ok, k] - Y[ok, k]) ** 2).mean() / Y[ok, k].var()
        out.append(1 - r.item())
    return out


torch.manual_seed(1)
X, Y = prepare()
train = DataLoader(TensorDataset(X[:360], Y[:360]), batch_size=12, shuffle=False)
model = MultiHead(X.shape[1])
crit = MaskedMSE([1.0, 0.5, 0.5])
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
sched = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=10)
ACCUM, step = 2, 0
for epoch in range(2):
    for bx, by in train:
        loss = crit(model(bx), by)
        check(loss, step)
        loss.backward()
        if (step + 1) % ACCUM == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
            sched.step()
        if step % 5 == 0:
            print(epoch, step, f"{loss.item():.4f}", "r2", ["%.2f" % s for s in score(model, X[360:], Y[360:])])
        step += 1
