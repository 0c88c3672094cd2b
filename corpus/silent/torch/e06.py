import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    """Noisy sinusoids; the target is the standardised frequency."""

    def __init__(self, n, length=64, seed=0):
        rng = np.random.default_rng(seed)
        freq = rng.uniform(1.0, 8.0, n)
        phase = rng.uniform(0, 2 * np.pi, n)
        t = np.linspace(0, 1, length)
        sig = np.sin(2 * np.pi * freq[:, None] * t + phase[:, None])
        sig += 0.1 * rng.standard_normal(sig.shape)
        self.x = torch.tensor(sig, dtype=torch.float32).unsqueeze(1)
        self.y = torch.tensor((freq - 4.5) / 2.02, dtype=torch.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class FreqNet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, ch, 7, stride=2, padding=3), nn.ReLU(),
            nn.Conv1d(ch, ch, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv1d(ch, ch, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        )
        self.out = nn.Linear(ch, 1)

    def forward(self, x):
        return self.out(self.body(x))


def weighted_mse(pred, target, weight=1.0):
    return (weight * (pred - target) ** 2).mean()


def evaluate(model, loader):
    model.eval()
    tot = n = 0
    with torch.no_grad():
        for x, y in loader:
            tot += weighted_mse(model(x), y).item() * len(y)
            n += len(y)
    model.train()
    return tot / n


def main(epochs=10):
    torch.manual_seed(11)
    train = DataLoader(Waves(1600, seed=1), batch_size=64, shuffle=True)
    test = DataLoader(Waves(320, seed=2), batch_size=64)
    model = FreqNet()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        running = 0.0
        for x, y in train:
            loss = weighted_mse(model(x), y)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            running += loss.item()
        print(f"epoch {epoch + 1}: train {running / len(train):.4f} test {evaluate(model, test):.4f}")


if __name__ == "__main__":
    main()
