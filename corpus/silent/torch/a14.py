# hourly electricity load (kW), next-hour forecast with an LSTM
import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(14)
torch.manual_seed(14)
hours = np.arange(3000)
load = (21000 + 3500 * np.sin(2 * np.pi * hours / 24) + 1500 * np.sin(2 * np.pi * hours / 168 + 1.0)
        + 400 * rng.normal(size=len(hours)))
series = torch.tensor(load, dtype=torch.float32)

WINDOW = 24


def windows(s):
    x = s.unfold(0, WINDOW, 1)[:-1]
    y = s[WINDOW:]
    return x.unsqueeze(-1), y.unsqueeze(-1)


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.fc(out[:, -1, :])


X, Y = windows(series)
n_train = 2400
train_set = torch.utils.data.TensorDataset(X[:n_train], Y[:n_train])
loader = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
model = Forecaster()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
mse = nn.MSELoss()

for epoch in range(7):
    losses = []
    for x, y in loader:
        loss = mse(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    with torch.no_grad():
        pred = model(X[n_train:])
        r2 = 1 - ((pred - Y[n_train:]) ** 2).mean() / Y[n_train:].var()
    print(f"epoch {epoch}  loss {np.mean(losses):.4f}  test R2 {r2.item():.3f}")
