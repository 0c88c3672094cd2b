"""What a healthy training is made of, and the data that several of them share."""

from __future__ import annotations

import builtins
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

__all__ = [
    "STEPS",
    "Batch",
    "Training",
    "cosine",
    "digits",
    "docstrings",
    "epochs",
    "error",
    "mlp",
    "windows",
]

STEPS = 2000
CHARACTERS = 64

Batch = tuple[Tensor, ...]


def _constant(step: int) -> float:
    return 1.0


def _nothing(step: int) -> None:
    pass


@dataclass
class Training:
    """One training at its beginning.

    Attributes:
        model: what ``optimizer`` trains.
        optimizer: a plain one; a runner may guard it.
        data: the micro-batches of a step, by position from 0; the same for the same position.
        loss: of a micro-batch in a step; positions and steps part when a run goes back.
        evaluate: how far the model is from its aim; smaller is better.
        rate: the factor of the learning rate in a step.
        before: called with the step before its forward pass.
        after: called with the step when it is done.
        clip: the norm to which gradients are clipped.
        steps: how many there are.
        extra: other things that a step changes, by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Callable[[int], Sequence[Batch]]
    loss: Callable[[Batch, int], Tensor]
    evaluate: Callable[[], float]
    rate: Callable[[int], float] = _constant
    before: Callable[[int], None] = _nothing
    after: Callable[[int], None] = _nothing
    clip: float | None = None
    steps: int = STEPS
    extra: dict[str, Any] = field(default_factory=dict)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths, with activations between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def cosine(step: int, steps: int = STEPS) -> float:
    """A rate that falls from 1 to 0."""
    return 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0))


def epochs(parts: Sequence[Tensor], rows: int, seed: int) -> Callable[[int], list[Batch]]:
    """Batches of so many rows in a new order in each epoch; what is left at its end is not used."""
    total = len(parts[0])
    per_epoch = total // rows

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> Tensor:
        return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(total))

    def at(position: int) -> list[Batch]:
        epoch, number = divmod(position, per_epoch)
        chosen = order(epoch)[number * rows : (number + 1) * rows]
        return [tuple(part[chosen] for part in parts)]

    return at


def error(model: nn.Module, x: Tensor, classes: Tensor) -> Callable[[], float]:
    """What measures the share of rows whose class the model gets wrong."""
    return lambda: float((model(x).argmax(-1) != classes).float().mean())


@functools.cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images from -1 to 1 and their classes, to train on and to evaluate on."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x = torch.tensor(found.data[order] / 8.0 - 1.0, dtype=torch.float32)
    y = torch.tensor(found.target[order])
    return x[:1200], y[:1200], x[1200:], y[1200:]


@functools.cache
def docstrings() -> Tensor:
    """The docstrings of Python's builtins, as numbers of their most frequent characters."""
    named = sorted(vars(builtins).items())
    text = np.array([ord(c) for name, thing in named if name != "_" for c in thing.__doc__ or ""])
    found, counts = np.unique(text, return_counts=True)
    kept = found[np.argsort(-counts, kind="stable")][: CHARACTERS - 1]
    number = np.full(text.max() + 1, CHARACTERS - 1)  # the last number is any other character
    number[kept] = np.arange(len(kept))
    return torch.from_numpy(number[text])


def windows(text: Tensor, rows: int, length: int, rng: np.random.Generator) -> Batch:
    """Stretches of a text from anywhere, and the characters that follow each of their characters."""
    starts = torch.from_numpy(rng.integers(len(text) - length, size=rows))
    found = text[starts[:, None] + torch.arange(length + 1)]
    return found[:, :-1], found[:, 1:]
