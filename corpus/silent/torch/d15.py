import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Detector(nn.Module):
    """Per-cell objectness on small synthetic radar frames."""

    def __init__(self, ch=24, prior=0.01):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, ch, 3, padding=1), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.ReLU(),
        )
        self.score = nn.Conv2d(ch, 1, 1)
        self.init_weights(prior)

    def init_weights(self, prior):
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
                nn.init.constant_(m.bias, -math.log((1 - prior) / prior))

    def forward(self, x):
        return self.score(self.features(x))[:, 0]


def frames(n, size=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = 0.3 * torch.randn(n, 1, size, size, generator=g)
    y = torch.zeros(n, size, size)
    for k in range(n):
        for _ in range(2):
            r, c = torch.randint(1, size - 1, (2,), generator=g).tolist()
            x[k, 0, r, c] += 1.0
            x[k, 0, r - 1, c] += 0.8
            x[k, 0, r, c + 1] += 0.8
            y[k, r, c] = 1.0
    return x, y


def focal(logits, target, gamma=2.0, alpha=0.75):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = target * p + (1 - target) * (1 - p)
    w = target * alpha + (1 - target) * (1 - alpha)
    return (w * (1 - pt) ** gamma * ce).sum() / target.sum()


def main():
    torch.manual_seed(0)
    x, y = frames(800)
    loader = DataLoader(TensorDataset(x[:640], y[:640]), batch_size=32, shuffle=True)
    model = Detector()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(8):
        total = 0.0
        for xb, yb in loader:
            loss = focal(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} focal {total / len(loader):.4f}")
    with torch.no_grad():
        out = model(x[640:])
        top = out.flatten(1).topk(2, dim=1).indices
        hit = y[640:].flatten(1).gather(1, top).mean().item()
    print(f"FINAL focal {total / len(loader):.4f} precision@2 {hit:.3f}")


if __name__ == "__main__":
    main()
