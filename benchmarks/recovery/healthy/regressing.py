"""Healthy trainings of regressions: large targets, rates at the edge of stability, heavy tails, waves."""

from __future__ import annotations

import math

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.recovery.healthy.training import Batch, Training, digits, epochs, mlp

__all__ = ["edge_of_stability", "heavy_tails", "large_targets", "waves"]


def _squares(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(functional.mse_loss(model(x), y))


def large_targets(seed: int) -> Training:
    """The progress of diabetes as it is in the table, from 25 to 346, with momentum and without clipping."""
    data, target = load_diabetes(return_X_y=True)
    x = torch.tensor(data / data.std(0), dtype=torch.float32)
    y = torch.tensor(target, dtype=torch.float32)[:, None]
    model = mlp(10, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    data_at = epochs((x[:300], y[:300]), 16, seed)
    return Training(model, optimizer, data_at, loss, lambda: _squares(model, x[300:], y[300:]))


def edge_of_stability(seed: int) -> Training:
    """Gradient descent on all rows with a rate at which the loss falls, but not in each step."""
    x, y = (part[:64] for part in digits()[:2])
    targets = functional.one_hot(y, 10).float()
    model = mlp(64, 48, 48, 10, activation=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def loss(batch: Batch, step: int) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum(1).mean()

    return Training(
        model, optimizer, lambda position: [(x, targets)], loss, lambda: _squares(model, x, targets)
    )


def heavy_tails(seed: int) -> Training:
    """Squared errors of targets whose noise has no variance: one row outweighs all others at times."""
    weights = torch.randn(8, 1)
    x = torch.randn(256, 8)
    model = mlp(8, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def at(position: int) -> list[Batch]:
        rng = np.random.default_rng((seed, position))
        inputs = torch.tensor(rng.normal(size=(32, 8)), dtype=torch.float32)
        noise = torch.tensor(rng.standard_t(1.5, size=(32, 1)), dtype=torch.float32)
        return [(inputs, inputs @ weights + noise)]

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    return Training(model, optimizer, at, loss, lambda: _squares(model, x, x @ weights), clip=1.0)


def waves(seed: int) -> Training:
    """A sum of sine waves, fitted by features of sine with RMSprop and without any schedule."""

    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(10.0 * x)

    def wave(x: Tensor) -> Tensor:
        return sum((torch.sin(2.0 * math.pi * k * x) / k for k in (1, 2, 5)), torch.zeros_like(x))

    model = mlp(1, 32, 32, 1, activation=Sine)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def at(position: int) -> list[Batch]:
        x = torch.tensor(np.random.default_rng((seed, position)).uniform(size=(32, 1)), dtype=torch.float32)
        return [(x, wave(x))]

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    grid = torch.linspace(0.0, 1.0, 200)[:, None]
    return Training(model, optimizer, at, loss, lambda: _squares(model, grid, wave(grid)))
