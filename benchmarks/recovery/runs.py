"""What a training is to the faults and to the ways of running it, the same in both frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from benchmarks.recovery.data import CHARACTERS

__all__ = [
    "COMMON",
    "EVALUATE_AT",
    "PROGRAMS",
    "RARE",
    "SETTINGS",
    "STEPS",
    "Run",
    "first_weights",
    "schedule",
]

STEPS = 300
WARM_UP = 20
EVALUATE_AT = (50, 161, 240)  # after so many steps; also at the end
PROGRAMS = ("digits", "transformer")
WIDTH, LAYERS, HEADS = 64, 2, 4
COMMON, RARE = "common", "rare"  # the tables that read the inputs of the two sources
# Of AdamW, in both frameworks.
SETTINGS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
RATES = {"digits": 3e-3, "transformer": 3e-3}
AVERAGE = 0.95  # what the transformer's averaged copy keeps at each step
MOMENTUM = 0.1  # what batch norm's statistics take from each batch

Array = np.ndarray[Any, Any]


class Run(Protocol):
    """One training.

    Attributes:
        outside: what the rare table's rate is multiplied by, from outside: no part of the state.
    """

    outside: float

    def step(self, batch: Any) -> float:
        """Train on a batch, with the schedule; return the loss."""

    def evaluate(self) -> float:
        """The loss on the held-out part, with the running statistics or the averaged copy."""

    def finite(self) -> bool:
        """Whether all of the state is: parameters, statistics, moments, averaged copy."""

    def updates(self) -> int:
        """How many updates the state has had, which is AdamW's count."""

    def edit(self, what: str, change: Callable[[Array], Array]) -> None:
        """Change the ``rare`` table, its moments ``m`` or ``v``, or the ``statistics``."""

    def set_rate(self, factor: float) -> None:
        """Multiply the rare table's learning rate, in the state."""

    def save(self) -> Any:
        """A copy of the state."""

    def load(self, saved: Any) -> None:
        """Go back to a copy."""

    def recovery(self, data: Callable[[int], Any], **policy: Any) -> Any:
        """The framework's ``Recovery`` of this run."""


def schedule(step: int) -> float:
    """The fraction of the rate at a step: a linear warm-up, then a cosine to 0.

    Example:
        >>> schedule(WARM_UP), round(schedule(STEPS), 9)
        (1.0, 0.0)
    """
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - WARM_UP) / (STEPS - WARM_UP))))


def first_weights(program: str, seed: int) -> dict[str, Array]:
    """The weights before training by name, float32, the same for both frameworks."""
    rng = np.random.default_rng((3, seed))

    def normal(*shape: int, size: float | None = None) -> Array:
        deviation = shape[-2] ** -0.5 if size is None else size
        return (deviation * rng.normal(size=shape)).astype(np.float32)

    if program == "digits":
        return {
            COMMON: normal(64, WIDTH),
            RARE: normal(64, WIDTH),
            "inner": normal(WIDTH, WIDTH),
            "head": normal(WIDTH, 10),
            "bias": np.zeros(10, np.float32),
            **{f"gain{i}": np.ones(WIDTH, np.float32) for i in range(2)},
            **{f"shift{i}": np.zeros(WIDTH, np.float32) for i in range(2)},
        }
    weights = {table: normal(CHARACTERS, WIDTH, size=0.5) for table in (COMMON, RARE)}
    weights["places"] = normal(64, WIDTH, size=0.1)
    for i in range(LAYERS):
        weights |= {
            f"qkv{i}": normal(WIDTH, 3 * WIDTH),
            f"out{i}": normal(WIDTH, WIDTH) / 2,
            f"up{i}": normal(WIDTH, 2 * WIDTH),
            f"down{i}": normal(2 * WIDTH, WIDTH) / 2,
        }
    gains = {f"gain{i}": np.ones(WIDTH, np.float32) for i in range(2 * LAYERS + 1)}
    return weights | gains | {"head": normal(WIDTH, CHARACTERS, size=0.02)}
