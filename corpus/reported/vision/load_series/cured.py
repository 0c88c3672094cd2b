import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

np.random.seed(42)
torch.manual_seed(42)

WINDOW = 24


def build(n_series):
    xs, ys = [], []
    for _ in range(n_series):
        period = np.random.uniform(6, 14)
        phase = np.random.uniform(0, 2 * np.pi)
        t = np.arange(WINDOW + 3)
        load = np.sin(2 * np.pi * t / period + phase) + 0.05 * np.random.randn(len(t))
        temp = np.cos(2 * np.pi * t / 24) + 0.05 * np.random.randn(len(t))
        xs.append(np.stack([load[:WINDOW], temp[:WINDOW]], -1))
        ys.append(load[WINDOW + 2])
    return torch.tensor(np.array(xs), dtype=torch.float32), torch.tensor(np.array(ys), dtype=torch.float32)


class Forecaster(nn.Module):
    def __init__(self, n_features=2, hidden=48):
        super().__init__()
        self.lstm = nn.LSTM(input_size=n_features, hidden_size=hidden, num_layers=1, batch_first=True)
        self.fc = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1, :]).squeeze(-1)


X, Y = build(1500)
Xv, Yv = build(400)
loader = DataLoader(TensorDataset(X, Y), batch_size=50, shuffle=True, drop_last=True)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loss_fn = nn.MSELoss()

for epoch in range(13):
    model.train()
    running = 0.0
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(xb), yb)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += loss.item()
    print(f"Epoch {epoch + 1}: train MSE {running / len(loader):.4f}")

model.eval()
with torch.no_grad():
    val = sum(loss_fn(model(Xv[i:i + 50]), Yv[i:i + 50]).item() for i in range(0, 400, 50)) / 8
print("FINAL", val)
