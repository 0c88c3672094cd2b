"""Denoising imputer. Missing lab values come as NaN and stay NaN until a batch is assembled."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(8)
torch.manual_seed(8)

latent = rng.normal(size=(800, 3))
table = latent @ rng.normal(size=(3, 10)) + 0.1 * rng.normal(size=(800, 10))
table = table * rng.uniform(0.5, 20, size=10) + rng.uniform(-50, 50, size=10)
holes = rng.random(table.shape) < 0.2
table[holes] = np.nan
table[17, :] = np.nan                      # one visit without any result

mean = np.nanmean(table, axis=0)
std = np.nanstd(table, axis=0)
data = torch.tensor((table - mean) / std, dtype=torch.float32)
train, test = data[:700], data[700:]


class Imputer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * d, 64), nn.ELU(), nn.Linear(64, 8), nn.ELU(),
                                 nn.Linear(8, 64), nn.ELU(), nn.Linear(64, d))

    def forward(self, x, known):
        return self.net(torch.cat([x, known.float()], dim=1))


def masked_mse(pred, target, mask):
    diff = torch.where(mask, pred - target, torch.zeros_like(pred))
    per_row = diff.pow(2).sum(1) / mask.sum(1).clamp(min=1)
    return per_row.mean()


def step(model, batch, hide=0.15):
    observed = ~torch.isnan(batch)
    x = torch.nan_to_num(batch, nan=0.0)
    visible = observed & (torch.rand_like(x) > hide)
    pred = model(x * visible, visible)
    return masked_mse(pred, x, observed), pred


def report(model):
    model.eval()
    with torch.no_grad():
        _, pred = step(model, test, hide=0.5)
        err = (pred - test).abs()          # NaN where the truth is missing
        per_column = torch.nanmean(err, dim=0)
    model.train()
    return per_column


model = Imputer(data.shape[1])
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
loader = DataLoader(TensorDataset(train), batch_size=70, shuffle=True)
curve = []
for epoch in range(30):
    tot = 0.0
    for (b,) in loader:
        loss, _ = step(model, b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        tot += loss.item() / len(loader)
    curve.append(tot)
    if epoch % 5 == 0:
        print(f"epoch {epoch:2d} loss {tot:.4f} test mae {report(model).mean():.4f}")

print(f"start {curve[0]:.4f} end {curve[-1]:.4f}")
assert curve[-1] < curve[0]
assert all(p.isfinite().all() for p in model.parameters())
