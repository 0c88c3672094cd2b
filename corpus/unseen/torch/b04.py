import numpy as np, torch
import torch.nn as nn
from torch.utils.data import TensorDataset, DataLoader

SEED = 21
torch.manual_seed(SEED)
rng = np.random.default_rng(SEED)


def simulate(n):
    """photon counts in 12 channels -> energy"""
    energy = rng.uniform(0.5, 3.0, size=n)
    gain = np.linspace(8.0, 40.0, 12)
    counts = rng.poisson(energy[:, None] * gain)
    return counts.astype(np.float32), energy.astype(np.float32)


def preprocess(counts):
    return np.log10(counts) - 1.0


def make_loaders():
    xc, yc = simulate(1400)
    x = torch.from_numpy(preprocess(xc))
    y = torch.from_numpy(yc)[:, None]
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    bad = ~torch.isfinite(x).all(1)
    keep = ~bad[1000:]
    tr = TensorDataset(x[:1000], y[:1000])
    va = TensorDataset(x[1000:][keep], y[1000:][keep])
    return DataLoader(tr, batch_size=50, shuffle=True), DataLoader(va, batch_size=100)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn0 = nn.BatchNorm1d(12)
        self.fc1 = nn.Linear(12, 48)
        self.bn1 = nn.BatchNorm1d(48)
        self.fc2 = nn.Linear(48, 1)

    def forward(self, x):
        x = self.bn0(x)
        x = torch.relu(self.bn1(self.fc1(x)))
        return self.fc2(x)


train_dl, val_dl = make_loaders()
net = Net()
opt = torch.optim.Adam(net.parameters(), 3e-3)
mse = nn.MSELoss()
best, best_state = float("inf"), None

for epoch in range(8):
    net.train()
    running, used, skipped = 0.0, 0, 0
    for xb, yb in train_dl:
        loss = mse(net(xb), yb)
        if not torch.isfinite(loss):
            skipped += 1
            continue
        opt.zero_grad()
        loss.backward()
        opt.step()
        running += loss.item()
        used += 1
    net.eval()
    with torch.no_grad():
        val = sum(mse(net(xb), yb).item() * len(xb) for xb, yb in val_dl) / len(val_dl.dataset)
    if val < best:
        best, best_state = val, {k: v.clone() for k, v in net.state_dict().items()}
    print(f"[{epoch}] train {running / max(used, 1):.4f} (skipped {skipped})  val {val:.4f}")

print("best validation mse:", best)
net.load_state_dict(best_state)
