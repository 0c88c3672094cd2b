import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class PointSets(Dataset):
    """Each item is a cloud of points; the label is the log of its spread."""

    def __init__(self, n, points=16, seed=0):
        g = torch.Generator().manual_seed(seed)
        scale = torch.exp(0.6 * torch.randn(n, 1, 1, generator=g))
        shift = 0.5 * torch.randn(n, 1, 3, generator=g)
        self.x = scale * torch.randn(n, points, 3, generator=g) + shift
        self.y = scale.squeeze(-1).squeeze(-1).log() / 0.6

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class DeepSets(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(3, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.rho = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        h = self.phi(x)
        pooled = torch.cat([h.mean(1), h.amax(1)], dim=-1)
        return self.rho(pooled)


def squared_error(pred, target):
    return (pred - target).pow(2).mean()


class Trainer:
    def __init__(self, model, train_set, test_set, lr=2e-3, batch_size=64):
        self.model = model
        self.loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        self.test_set = test_set
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            losses = []
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = squared_error(self.model(x), y)
                loss.backward()
                self.opt.step()
                losses.append(loss.item())
            print(f"epoch {epoch:2d} train mse {sum(losses) / len(losses):.4f}")

    @torch.no_grad()
    def report(self):
        self.model.eval()
        pred = self.model(self.test_set.x).view(-1)
        y = self.test_set.y
        r2 = 1 - ((pred - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        print(f"test r2 {r2.item():.3f}  prediction std {pred.std().item():.3f}  target std {y.std().item():.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    trainer = Trainer(DeepSets(), PointSets(1600, seed=1), PointSets(400, seed=2))
    trainer.fit(14)
    trainer.report()
