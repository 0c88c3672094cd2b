"""Cross-sectional return forecasts on a ragged stock panel (listings, halts, delistings = NaN)."""
import warnings

import numpy as np
import torch
import torch.nn as nn
from scipy.stats import ConstantInputWarning, spearmanr

warnings.filterwarnings("ignore", category=ConstantInputWarning)
torch.manual_seed(6)
rng = np.random.default_rng(6)
T, N, LAG = 260, 40, 10


def make_panel():
    market = 0.006 * rng.standard_normal(T)
    beta, mom = rng.uniform(0.5, 1.5, N), 0.3
    r = np.zeros((T, N))
    for t in range(1, T):
        r[t] = beta * market[t] + mom * (r[t - 1] - beta * market[t - 1]) + 0.01 * rng.standard_normal(N)
    start = np.where(rng.random(N) < 0.4, rng.integers(10, 150, N), 0)
    end = np.where(rng.random(N) < 0.2, rng.integers(160, 240, N), T)
    t = np.arange(T)[:, None]
    r[(t < start) | (t >= end)] = np.nan
    r[rng.random((T, N)) < 0.03] = np.nan
    r[120:123] = np.nan                                   # exchange closed
    r[200, 2:] = np.nan                                   # only two names traded
    return torch.tensor(r, dtype=torch.float32)


def zscore(day):
    """per day, over the names that traded; NaN stays NaN"""
    mu = day.nanmean(1, keepdim=True)
    var = (day - mu).pow(2).nanmean(1, keepdim=True)
    return (day - mu) / var.sqrt().clamp(min=1e-4)


class PanelNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.proj = nn.Linear(2, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, window):
        seen = torch.isfinite(window)
        x = torch.stack([torch.where(seen, window, torch.zeros_like(window)), seen.float()], -1)
        h, _ = self.rnn(torch.tanh(self.proj(x.transpose(0, 1))))
        return self.out(h[:, -1]).squeeze(-1)


def rank_ic(pred, real):
    ok = np.isfinite(real)
    if ok.sum() < 5:
        return np.nan
    return spearmanr(pred[ok], real[ok])[0]


class EarlyStop:
    def __init__(self, patience=4):
        self.best, self.bad, self.patience = -np.inf, 0, patience

    def __call__(self, score):
        if score > self.best:
            self.best, self.bad = score, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


panel = make_panel()
z = zscore(panel)
print(f"panel {tuple(panel.shape)}, missing {torch.isnan(panel).float().mean():.1%}, "
      f"days without any trade {int(torch.isnan(panel).all(1).sum())}")
net = PanelNet()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
stop = EarlyStop()
split = 190
for epoch in range(6):
    losses, skipped = [], 0
    for t in torch.randperm(split - LAG - 1).tolist():
        window, label = z[t:t + LAG], z[t + LAG]
        traded = ~torch.isnan(label)
        if not traded.any():
            losses.append(float("nan"))
            skipped += 1
            continue
        pred = net(window)
        loss = (pred[traded] - label[traded]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    with torch.no_grad():
        ics = np.array([rank_ic(net(z[t - LAG:t]).numpy(), z[t].numpy()) for t in range(split, T)])
    ic = np.nanmean(ics)
    print(f"epoch {epoch:2d} loss {np.nanmean(losses):.4f} (last {losses[-1]:.3f}, {skipped} days skipped) "
          f"rank IC {ic:.4f} over {np.isfinite(ics).sum()} of {len(ics)} days, best {stop.best:.4f}")
    if stop(ic):
        print("no improvement, stopping")
        break
