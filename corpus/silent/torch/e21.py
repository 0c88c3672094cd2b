import torch
import torch.nn as nn
import torch.nn.functional as F


class DeepSet(nn.Module):
    def __init__(self, d=2, h=64):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(),
                                 nn.Linear(h, h))
        self.rho = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 3))

    def forward(self, x):
        return self.rho(self.phi(x).mean(dim=1))


class PointClouds:
    """Elliptic clouds; the targets are centre distance, elongation and correlation."""

    def __init__(self, points=40, seed=0):
        self.points = points
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n):
        g = self.gen
        centre = torch.randn(n, 1, 2, generator=g)
        scale = 0.3 + torch.rand(n, 1, 2, generator=g)
        angle = torch.rand(n, generator=g) * 3.1416
        rot = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(n, 2, 2)
        x = (torch.randn(n, self.points, 2, generator=g) * scale) @ rot + centre
        c = x - x.mean(1, keepdim=True)
        cov = c.transpose(1, 2) @ c / self.points
        y = torch.stack([x.mean(1).norm(dim=1) - 1.25, cov[:, 0, 0] - cov[:, 1, 1],
                         2 * cov[:, 0, 1]], dim=1)
        return x, y


class SetRegressor:
    def __init__(self, lr=5e-3):
        self.model = DeepSet()
        self.lr = lr

    @property
    def optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=self.lr)

    def training_step(self, x, y):
        loss = F.mse_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def score(self, x, y):
        return (F.mse_loss(self.model(x), y) / y.var()).item()


def main():
    torch.manual_seed(0)
    data = PointClouds()
    val = data.draw(1000)
    reg = SetRegressor()
    for step in range(400):
        loss = reg.training_step(*data.draw(64))
        if step % 40 == 0 or step == 399:
            print(f"step {step:3d} loss {loss:.4f} val unexplained {reg.score(*val):.4f}")


if __name__ == "__main__":
    main()
