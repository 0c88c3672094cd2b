"""Regression on several targets, of which a third is missing: NaN in the table, masked in the loss."""
import numpy as np
import torch
import torch.nn as nn


def table(n=3000, seed=0):
    r = np.random.default_rng(seed)
    x = r.normal(size=(n, 10))
    w = r.normal(size=(10, 4)) / np.sqrt(10)
    y = np.tanh(x @ w) + 0.3 * (x[:, :4] * x[:, 4:8]) + 0.05 * r.normal(size=(n, 4))
    y[r.random(y.shape) < 0.33] = np.nan
    x[r.random(x.shape) < 0.05] = np.nan
    return x.astype(np.float32), y.astype(np.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 96), nn.SiLU(), nn.Linear(96, 96), nn.SiLU(), nn.Linear(96, 4))

    def forward(self, x):
        known = ~torch.isnan(x)
        return self.body(torch.cat([torch.nan_to_num(x), known.float()], -1))


def masked_mse(pred, target):
    known = ~torch.isnan(target)
    error = torch.where(known, pred - torch.nan_to_num(target), torch.zeros_like(pred))
    return error.square().sum() / known.sum().clamp(min=1)


def r2(pred, target):
    """Explained variance of each target, over the rows where it is known."""
    scores = []
    for p, t in zip(pred.T, target.T):
        known = ~torch.isnan(t)
        scores.append(1 - (p[known] - t[known]).var() / t[known].var())
    return torch.stack(scores)


def main(epochs=25):
    torch.manual_seed(0)
    x, y = map(torch.tensor, table())
    mean, std = np.nanmean(y[:2400], 0), np.nanstd(y[:2400], 0)
    y = (y - torch.tensor(mean)) / torch.tensor(std)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:2400], y[:2400]), 64, shuffle=True)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-3, total_steps=epochs * len(loader))
    for epoch in range(epochs):
        total = 0.0
        for a, b in loader:
            loss = masked_mse(net(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            schedule.step()
            total += loss.item()
        if epoch % 5 == 0:
            print(f"epoch {epoch:2d} loss {total / len(loader):.4f}")
    with torch.no_grad():
        print("r2", [f"{v:.3f}" for v in r2(net(x[2400:]), y[2400:]).tolist()])


if __name__ == "__main__":
    main()
