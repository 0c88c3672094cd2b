"""Multi-task assay prediction: sparse labels (NaN = not measured) and gaps in the descriptors."""
import numpy as np
import torch
import torch.nn as nn
from sklearn.metrics import roc_auc_score

rs = np.random.RandomState(55)
torch.manual_seed(55)

N, D, TASKS = 900, 16, 5
X = rs.randn(N, D)
W = rs.randn(D, TASKS)
Y = (X @ W + 0.8 * rs.randn(N, TASKS) > 1.0).astype(float)
measured = rs.rand(N, TASKS) < np.array([0.9, 0.6, 0.3, 0.1, 0.008])
Y[~measured] = np.nan
X[rs.rand(N, D) < 0.08] = np.nan

mean = np.nanmean(X[:700], axis=0)
std = np.nanstd(X[:700], axis=0)
missing = np.isnan(X)
X = np.where(missing, 0.0, (X - mean) / std)
X = np.concatenate([X, missing.astype(float)], axis=1)

Xt, Yt = torch.tensor(X, dtype=torch.float32), torch.tensor(Y, dtype=torch.float32)
Xtr, Ytr, Xva, Yva = Xt[:700], Yt[:700], Xt[700:], Yt[700:]


def masked_bce(logits, labels):
    mask = ~torch.isnan(labels)
    safe = torch.where(mask, labels, torch.zeros_like(labels))
    raw = nn.functional.binary_cross_entropy_with_logits(logits, safe, reduction="none") * mask
    per_task = raw.sum(0) / mask.sum(0).clamp(min=1)
    return per_task.sum() / mask.any(0).sum().clamp(min=1)


def auc_per_task(logits, labels):
    out = []
    for t in range(labels.shape[1]):
        m = ~torch.isnan(labels[:, t])
        yt = labels[m, t].numpy()
        out.append(roc_auc_score(yt, logits[m, t].numpy()) if len(set(yt)) == 2 else float("nan"))
    return np.array(out)


net = nn.Sequential(nn.Linear(2 * D, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, TASKS))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
best = -np.inf
patience_loss = float("inf")
for epoch in range(13):
    net.train()
    total = 0.0
    for b in torch.randperm(len(Xtr)).split(20):
        loss = masked_bce(net(Xtr[b]), Ytr[b])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    net.eval()
    with torch.no_grad():
        aucs = auc_per_task(net(Xva), Yva)
    best = max(best, np.nanmean(aucs))
    patience_loss = min(patience_loss, total)
    if epoch % 4 == 0:
        print(f"{epoch:2d} loss {total / 35:.4f} auc {np.round(aucs, 3)} mean {np.nanmean(aucs):.3f}")
print("best mean auc", round(best, 3))
