"""Forecast tomorrow's bike rentals from a small CSV export."""
import io

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def export():
    rng = np.random.default_rng(3)
    rows = ["day,temp,humidity,wind,weekend,count"]
    for d in range(360):
        temp = 12 + 9 * np.sin(2 * np.pi * d / 365) + rng.normal(0, 2)
        hum, wind = rng.uniform(35, 95), rng.gamma(2, 6)
        wk = int(d % 7 in (5, 6))
        cnt = max(0, 900 + 60 * temp - 5 * hum - 8 * wind + 120 * wk + rng.normal(0, 80))
        cells = [f"{d}", f"{temp:.2f}", f"{hum:.1f}", f"{wind:.1f}", f"{wk}", f"{cnt:.0f}"]
        if d in (211, 212):
            cells[3] = ""                 # anemometer was being serviced
        rows.append(",".join(cells))
    return "\n".join(rows)


class Bikes(Dataset):
    def __init__(self, text, lo, hi, stats=None):
        raw = np.genfromtxt(io.StringIO(text), delimiter=",", skip_header=1)
        x, y = raw[lo:hi, 1:5], raw[lo:hi, 5]
        if stats is None:
            stats = x[:120].mean(0), x[:120].std(0), y.mean(), y.std()
        self.stats = stats
        self.x = torch.tensor((x - stats[0]) / stats[1], dtype=torch.float32)
        self.y = torch.tensor((y - stats[2]) / stats[3], dtype=torch.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2, self.drop = nn.Linear(4, 32), nn.Linear(32, 1), nn.Dropout(0.1)

    def forward(self, x):
        return self.l2(self.drop(torch.relu(self.l1(x)))).squeeze(-1)


def run_epoch(model, loader, opt=None):
    model.train(opt is not None)
    tot = 0.0
    with torch.set_grad_enabled(opt is not None):
        for x, y in loader:
            loss = nn.functional.huber_loss(model(x), y)
            if opt is not None:
                opt.zero_grad()
                loss.backward()
                opt.step()
            tot += loss.item() * len(x)
    return tot / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(0)
    csv_text = export()
    train_set = Bikes(csv_text, 0, 300)
    val_set = Bikes(csv_text, 300, 360, stats=train_set.stats)
    train_loader = DataLoader(train_set, batch_size=20, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=60)
    model = Model()
    opt = torch.optim.NAdam(model.parameters(), lr=5e-3)
    for ep in range(6):
        tr = run_epoch(model, train_loader, opt)
        va = run_epoch(model, val_loader)
        print(f"epoch {ep} train {tr:.4f} val {va:.4f}")
