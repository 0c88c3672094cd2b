"""Domain adversarial training: a gradient reversal layer whose factor warms up from 0."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class DANN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.label = nn.Linear(hidden, 2)
        self.domain = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    def forward(self, x, factor):
        h = self.features(x)
        return self.label(h), self.domain(Reverse.apply(h, factor))


def batch(n, target):
    """The label is in the first two features; the domain shifts and rotates the others."""
    x = torch.randn(n, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    if target:
        x[:, 2:5] += 1.5
        x[:, 5:] *= 1.5
    return x, y


def main(steps=800):
    torch.manual_seed(0)
    model = DANN()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        factor = 2 / (1 + math.exp(-10 * step / steps)) - 1
        source, y = batch(128, False)
        target, _ = batch(128, True)
        label, domain = model(torch.cat([source, target]), factor)
        where = torch.cat([torch.zeros(128), torch.ones(128)]).long()
        loss = F.cross_entropy(label[:128], y) + 0.3 * F.cross_entropy(domain, where)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 100 == 0:
            guess = (domain.argmax(1) == where).float().mean()
            print(f"{step:4d} loss {loss.item():.4f} factor {factor:.2f} domain accuracy {guess:.2f}")
    with torch.no_grad():
        x, y = batch(2000, True)
        print(f"target accuracy {(model(x, 0.0)[0].argmax(1) == y).float().mean():.3f}")


if __name__ == "__main__":
    main()
