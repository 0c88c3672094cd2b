"""Healthy trainings of classifiers: schedules of the rate, losses and regularization."""

from __future__ import annotations

import torch
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.recovery.healthy.training import STEPS, Batch, Training, cosine, digits, epochs, error, mlp

__all__ = [
    "accumulation",
    "averaged_copy",
    "hinge",
    "label_smoothing",
    "memorizing",
    "one_cycle",
    "step_decay",
    "stochastic_depth",
    "tiny_batches",
    "warm_restarts",
]


def _digits(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, rows: int = 32, smoothing: float = 0.0
) -> Training:
    """A training on the digits with cross entropy."""
    x, y, held_out, classes = digits()

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)

    return Training(model, optimizer, epochs((x, y), rows, seed), loss, error(model, held_out, classes))


def warm_restarts(seed: int) -> Training:
    """The rate falls by a cosine and jumps back to its full height, three times."""
    model = mlp(64, 64, 10)
    training = _digits(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), seed)
    training.rate = lambda step: cosine(step % 500, 500)
    return training


def step_decay(seed: int) -> Training:
    """A small convolutional network, as residual networks are trained: a tenth of the rate, twice."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    training = _digits(model, optimizer, seed)
    training.rate = lambda step: 0.1 ** (step // (STEPS // 3))
    return training


def one_cycle(seed: int) -> Training:
    """One cycle of the rate, up to a height at which the loss is noisy."""
    model = mlp(64, 64, 64, 10)
    training = _digits(model, torch.optim.AdamW(model.parameters(), lr=1e-2), seed)

    def rate(step: int) -> float:
        top = 0.3 * STEPS
        if step < top:
            return 0.04 + 0.96 * (1.0 - cosine(step, round(top)))
        return cosine(step - round(top), STEPS - round(top))

    training.rate = rate
    return training


def memorizing(seed: int) -> Training:
    """AdamW on 64 images with random classes, long after each of them is known by heart."""
    x = digits()[0][:64]
    classes = torch.randint(10, (64,))
    model = mlp(64, 64, 64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    known = error(model, x, classes)
    return Training(model, optimizer, epochs((x, classes), 16, seed), loss, known, steps=2 * STEPS)


def label_smoothing(seed: int) -> Training:
    """Smoothed labels, whose loss ends far above 0."""
    model = mlp(64, 64, 10)
    return _digits(model, torch.optim.Adam(model.parameters(), lr=2e-3), seed, smoothing=0.1)


def hinge(seed: int) -> Training:
    """A margin that nearly all wines keep after some time: the loss of most batches is exactly 0."""
    data, target = load_wine(return_X_y=True)
    x, y = torch.tensor(data, dtype=torch.float32), torch.tensor(target)
    x = (x - x.mean(0)) / x.std(0)
    model = nn.Linear(13, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(batch: Batch, step: int) -> Tensor:
        return functional.multi_margin_loss(model(batch[0]), batch[1])

    return Training(model, optimizer, epochs((x, y), 4, seed), loss, error(model, x, y))


def averaged_copy(seed: int) -> Training:
    """A moving average of the weights, which alone is evaluated."""
    model = mlp(64, 64, 10)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    training = _digits(model, torch.optim.SGD(model.parameters(), lr=0.2), seed, rows=16)
    training.evaluate = error(average, *digits()[2:])
    training.after = lambda step: average.update_parameters(model)
    training.extra = {"average": average}
    return training


def accumulation(seed: int) -> Training:
    """Gradients of four micro-batches in each step."""
    model = mlp(64, 64, 10)
    training = _digits(model, torch.optim.AdamW(model.parameters(), lr=3e-3), seed, rows=32)
    whole = training.data
    training.data = lambda position: [
        part for x, y in whole(position) for part in zip(x.split(8), y.split(8), strict=True)
    ]
    training.rate = cosine
    return training


def tiny_batches(seed: int) -> Training:
    """Batch norm over four rows."""
    model = nn.Sequential(
        nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()
    )
    model.append(nn.Linear(48, 10))
    return _digits(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), seed, rows=4)


class _Deep(nn.Module):
    """Residual blocks, each of which is left out at times; the deeper, the more often."""

    def __init__(self, width: int = 48, depth: int = 8, dropped: float = 0.5) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), mlp(width, width, width), nn.Dropout(0.2))
            for _ in range(depth)
        )
        self.kept = [1.0 - dropped * (i + 1) / depth for i in range(depth)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block, kept in zip(self.blocks, self.kept, strict=True):
            if not self.training:
                x = x + kept * block(x)
            elif float(torch.rand(())) < kept:
                x = x + block(x)
        return self.head(x)


def stochastic_depth(seed: int) -> Training:
    """Whole layers and single features are left out at random."""
    model = _Deep()
    training = _digits(model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05), seed)
    training.rate = lambda step: min(1.0, step / 100) * cosine(step)
    return training
