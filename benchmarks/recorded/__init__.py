"""Losses and gradient norms of real training runs, and labelled spikes planted into them.

The files were written by ``python -m benchmarks.record_streams``; each describes what was trained.

    stream = load("transformer-adamw")
    spiked = with_spikes(stream, seed=0)
    caught = my_rule(spiked.stream.loss, spiked.stream.norm) & spiked.labels
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

__all__ = ["NAMES", "Planted", "RecordedStream", "SpikedStream", "constant", "load", "with_spikes"]

FOLDER = Path(__file__).parent
NAMES = ("mlp-edge", "mlp-sgd", "pixels-schedule", "transformer-adamw")

Array: TypeAlias = "np.ndarray[Any, Any]"

SECOND_AFTER = 10  # steps between the two spikes of a masked pair


class RecordedStream(NamedTuple):
    """The losses and norms that a guard of the training run would have observed; float64.

    Attributes:
        name: the name of the file.
        loss: (T,), unscaled.
        norms: (T, n), the gradient norm of each tensor, unscaled.
        names: the names of the n tensors.
        about: one sentence about the run.
    """

    name: str
    loss: Array
    norms: Array
    names: tuple[str, ...]
    about: str = ""

    @property
    def norm(self) -> Array:
        """(T,), the joint norm of each step."""
        return np.sqrt((self.norms**2).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Planted:
    """One bad step.

    Attributes:
        step: the index of the step.
        kind: ``"single"``; ``"masking"`` and, ten steps later and smaller, ``"masked"``;
            ``"nonfinite"``.
        norm_factor: multiplies all norms of the step; NaN or inf replaces them.
        loss_factor: the same for the loss.
    """

    step: int
    kind: str
    norm_factor: float
    loss_factor: float


class SpikedStream(NamedTuple):
    """A stream with planted spikes.

    Attributes:
        stream: the stream with the spikes in it.
        labels: (T,), whether a spike was planted at the step. The run's own spikes are not labelled.
        planted: the planted spikes, ordered by step.
    """

    stream: RecordedStream
    labels: Array
    planted: tuple[Planted, ...]


def load(name: str) -> RecordedStream:
    """A recorded stream, one of :data:`NAMES`.

    Raises:
        ValueError: there is no stream of that name.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}; got {name!r}.")
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return RecordedStream(
        name=name,
        loss=np.array(document["loss"]),
        norms=np.array(document["norms"]).T,
        names=tuple(document["names"]),
        about=document["about"],
    )


def constant(*, steps: int = 1500, loss: float = 1.0, norm: float = 1.0) -> RecordedStream:
    """A stream without spread: the same loss and the same norm at every step."""
    return RecordedStream("constant", np.full(steps, loss), np.full((steps, 1), norm), ("weight",))


def with_spikes(
    stream: RecordedStream,
    *,
    seed: int,
    singles: int = 12,
    pairs: int = 6,
    nonfinite: int = 4,
    factors: tuple[float, float] = (5.0, 100.0),
    on: Sequence[str] = ("norm", "loss", "both"),
    start: int = 150,
    apart: int = 25,
) -> SpikedStream:
    """Plant spikes at random, labelled steps.

    Args:
        stream: the stream, which is not changed.
        seed: the seed of steps, factors and kinds; the same seed gives the same spikes.
        singles: the number of single spikes, with a factor log-uniform between ``factors``.
        pairs: the number of pairs of a spike of 100 and, ten steps later, one of 20: the first raises the
            mean and standard deviation of a window, which hides the second.
        nonfinite: the number of steps with NaN or inf.
        factors: the range of the factors of single spikes.
        on: which signals have spikes; one of these is drawn for each spike or pair.
        start: no spike is before this step, so that a rule's window is full.
        apart: the smallest number of ordinary steps after each single spike, pair and non-finite step.

    Raises:
        ValueError: the spikes do not fit into the stream, or ``on`` is empty or contains an unknown word.
    """
    if not on or not set(on) <= {"norm", "loss", "both"}:
        raise ValueError(f"on must be some of 'norm', 'loss' and 'both'; got {on!r}.")
    rng = np.random.default_rng(seed)
    kinds = rng.permutation(["single"] * singles + ["pair"] * pairs + ["nonfinite"] * nonfinite).tolist()
    planted: list[Planted] = []
    for kind, first in zip(kinds, _places(rng, kinds, start, len(stream.loss), apart), strict=True):
        where = on[int(rng.integers(len(on)))]
        if kind == "single":
            low, high = np.log(factors)
            planted.append(_spike(first, "single", where, float(np.exp(rng.uniform(low, high)))))
        elif kind == "pair":
            planted.append(_spike(first, "masking", where, 100.0))
            planted.append(_spike(first + SECOND_AFTER, "masked", where, 20.0))
        else:
            planted.append(_spike(first, "nonfinite", where, (math.nan, math.inf)[int(rng.integers(2))]))
    return _plant(stream, tuple(planted))


def _places(rng: np.random.Generator, kinds: Sequence[str], start: int, steps: int, apart: int) -> list[int]:
    """The first step of each spike: the remaining steps are distributed at random between the spikes."""
    lengths = np.array([(SECOND_AFTER + 1 if kind == "pair" else 1) + apart for kind in kinds], dtype=int)
    spare = steps - start - int(lengths.sum())
    if spare < 0:
        raise ValueError(
            f"the spikes need {int(lengths.sum())} steps after step {start}, but the stream has only {steps} "
            "in all; plant fewer, or reduce `apart`."
        )
    before = np.cumsum(lengths) - lengths
    return (start + before + np.sort(rng.integers(spare + 1, size=len(kinds)))).tolist()


def _spike(step: int, kind: str, where: str, factor: float) -> Planted:
    norm_factor = factor if where in ("norm", "both") else 1.0
    loss_factor = factor if where in ("loss", "both") else 1.0
    return Planted(step, kind, norm_factor, loss_factor)


def _plant(stream: RecordedStream, planted: tuple[Planted, ...]) -> SpikedStream:
    loss, norms = stream.loss.copy(), stream.norms.copy()
    labels = np.zeros(len(loss), dtype=bool)
    for spike in planted:
        labels[spike.step] = True
        # A non-finite factor replaces the value instead of multiplying it: 0 x inf would be NaN.
        finite = math.isfinite(spike.norm_factor)
        norms[spike.step] = norms[spike.step] * spike.norm_factor if finite else spike.norm_factor
        finite = math.isfinite(spike.loss_factor)
        loss[spike.step] = loss[spike.step] * spike.loss_factor if finite else spike.loss_factor
    return SpikedStream(stream._replace(loss=loss, norms=norms), labels, planted)
