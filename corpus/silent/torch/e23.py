import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def station_log(n, seed):
    rng = np.random.default_rng(seed)
    pressure = rng.normal(101325.0, 900.0, n)
    temperature = rng.normal(288.0, 9.0, n)
    humidity = rng.uniform(20.0, 100.0, n)
    wind = rng.gamma(2.0, 2.5, n)
    dew = (temperature - 288.0) / 9.0 + (humidity - 60.0) / 23.0
    y = np.sin(dew) + 0.6 * (pressure - 101325.0) / 900.0 * np.tanh(wind / 5.0 - 1.0)
    y = y + 0.05 * rng.standard_normal(n)
    x = np.stack([pressure, temperature, humidity, wind], axis=1)
    return x.astype(np.float32), y.astype(np.float32)


class Forecaster(nn.Module):
    def __init__(self, n_features, hidden=64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, hidden), nn.Tanh(),
            nn.Linear(hidden, hidden), nn.Tanh(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.layers(x).squeeze(1)


def loaders(batch_size=64):
    xtr, ytr = station_log(2048, 0)
    xva, yva = station_log(512, 1)
    m, s = ytr.mean(), ytr.std()
    ytr, yva = (ytr - m) / s, (yva - m) / s
    train = TensorDataset(torch.from_numpy(xtr), torch.from_numpy(ytr))
    valid = TensorDataset(torch.from_numpy(xva), torch.from_numpy(yva))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(valid, 512)


def fit(epochs=12, lr=5e-3):
    train, valid = loaders()
    net = Forecaster(4)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    criterion = nn.MSELoss()
    for epoch in range(epochs):
        net.train()
        losses = []
        for x, y in train:
            optimizer.zero_grad()
            loss = criterion(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
        net.eval()
        with torch.no_grad():
            x, y = next(iter(valid))
            val = criterion(net(x), y).item()
        print(f"epoch {epoch:2d} train {np.mean(losses):.4f} valid {val:.4f}")


if __name__ == "__main__":
    torch.manual_seed(1)
    fit()
