"""Sensor table with gaps (NaN = sensor offline). Gaps become (train mean, flag 1). Site-wise metrics at the end of
every epoch; a site with only one kind of event in the validation part has no AUC -> NaN, averaged with nanmean."""
import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score

rng = np.random.default_rng(31)
torch.manual_seed(31)
N, D, SITES = 1500, 8, 7


def build_table():
    site = rng.integers(0, SITES, N)
    X = rng.normal(size=(N, D)) * rng.uniform(0.5, 4, D) + rng.normal(size=(SITES, D))[site]
    score = X @ rng.normal(size=D) * 0.5 + 0.8 * np.sin(X[:, 0]) * X[:, 1]
    y = (score + 0.3 * rng.normal(size=N) > np.median(score)).astype(np.float32)
    y[site == 4] = 0.0
    X[rng.random(X.shape) < 0.12] = np.nan
    X[site == 2, 5] = np.nan
    return X.astype(np.float32), y, site


class GapFiller:
    def fit(self, X):
        self.mean = np.nanmean(X, axis=0)
        self.std = np.nanstd(X, axis=0)
        return self

    def __call__(self, X):
        gap = np.isnan(X)
        Z = np.where(gap, 0.0, (X - self.mean) / self.std)
        return torch.tensor(np.concatenate([Z, gap], axis=1), dtype=torch.float32)


class Net(nn.Module):
    def __init__(self, din):
        super().__init__()
        self.site = nn.Embedding(SITES, 3)
        self.mlp = nn.Sequential(nn.Linear(din + 3, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x, s):
        return self.mlp(torch.cat([x, self.site(s)], 1)).squeeze(1)


def per_site_auc(y, p, site):
    out = np.full(SITES, np.nan)
    for k in range(SITES):
        sel = site == k
        if len(np.unique(y[sel])) == 2:
            out[k] = roc_auc_score(y[sel], p[sel])
    return out


X, y, site = build_table()
tr, va = np.arange(N) < 1100, np.arange(N) >= 1100
fill = GapFiller().fit(X[tr])
xt, xv = fill(X[tr]), fill(X[va])
st, sv = torch.tensor(site[tr]), torch.tensor(site[va])
yt, yv = torch.tensor(y[tr]), torch.tensor(y[va])

model = Net(2 * D)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)
best, patience, bad = -np.inf, 4, 0
previous = float("nan")
for epoch in range(12):
    model.train()
    total = 0.0
    for b in torch.randperm(len(xt)).split(64):
        loss = nn.functional.binary_cross_entropy_with_logits(model(xt[b], st[b]), yt[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * len(b)
    model.eval()
    with torch.no_grad():
        p = torch.sigmoid(model(xv, sv)).numpy()
    auc = per_site_auc(y[va], p, site[va])
    mean_auc = np.nanmean(auc)
    total /= len(xt)
    print(f"epoch {epoch} loss {total:.4f} change {total - previous:+.4f} auc {mean_auc:.3f} per site", np.round(auc, 2))
    previous = total
    if mean_auc > best + 1e-3:
        best, bad = mean_auc, 0
    else:
        bad += 1
    if bad > patience:
        break
print("best site-mean auc %.3f" % best)
