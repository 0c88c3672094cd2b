"""Losses and gradient norms of real trainings, and spikes planted into them with labels.

The files were written by ``python -m benchmarks.record_streams``; each says in it what was trained.

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
    """What a training's guard would have seen; float64.

    Attributes:
        name: of the file.
        loss: (T,), unscaled.
        norms: (T, n), the gradient norm of each tensor, unscaled.
        names: of the n tensors.
        about: one sentence.
    """

    name: str
    loss: Array
    norms: Array
    names: tuple[str, ...]
    about: str = ""

    @property
    def norm(self) -> Array:
        """(T,), the joint norm."""
        return np.sqrt((self.norms**2).sum(axis=1))


@dataclass(frozen=True, slots=True)
class Planted:
    """One bad step.

    Attributes:
        step: when.
        kind: ``"single"``; ``"masking"`` and, ten steps later and smaller, ``"masked"``;
            ``"nonfinite"``.
        norm_factor: all norms of the step are multiplied by it; NaN and inf are put there.
        loss_factor: the same of the loss.
    """

    step: int
    kind: str
    norm_factor: float
    loss_factor: float


class SpikedStream(NamedTuple):
    """A stream with planted spikes.

    Attributes:
        stream: with them in it.
        labels: (T,), whether a step was planted. A training's own spikes are not labelled.
        planted: by step.
    """

    stream: RecordedStream
    labels: Array
    planted: tuple[Planted, ...]


def load(name: str) -> RecordedStream:
    """A recorded stream, one of :data:`NAMES`.

    Raises:
        ValueError: there is none of that name.
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
    """A stream without any spread: same loss, same norm at every step."""
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
        stream: left as it is.
        seed: of steps, factors and kinds; the same seed gives the same spikes.
        singles: lone spikes, their factor log-uniform between ``factors``.
        pairs: a spike of 100 and, ten steps later, one of 20: in a window the first hides the
            second from a mean and a standard deviation.
        nonfinite: steps of NaN or inf.
        factors: of the lone spikes.
        on: what spikes; drawn from these for each spike or pair.
        start: no spike before this step, so that a rule's window is full.
        apart: at least so many ordinary steps after each lone spike, pair and non-finite step.

    Raises:
        ValueError: they do not fit into the stream, or ``on`` has another word or none.
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
    """First steps: the room that is left over is spread at random between the spikes."""
    lengths = np.array([(SECOND_AFTER + 1 if kind == "pair" else 1) + apart for kind in kinds], dtype=int)
    spare = steps - start - int(lengths.sum())
    if spare < 0:
        raise ValueError(
            f"the spikes need {int(lengths.sum())} steps after step {start}, the stream has {steps} in all; "
            "plant fewer, or put them less far apart."
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
        # Selected, not multiplied, where not finite: 0 x inf would be NaN.
        finite = math.isfinite(spike.norm_factor)
        norms[spike.step] = norms[spike.step] * spike.norm_factor if finite else spike.norm_factor
        finite = math.isfinite(spike.loss_factor)
        loss[spike.step] = loss[spike.step] * spike.loss_factor if finite else spike.loss_factor
    return SpikedStream(stream._replace(loss=loss, norms=norms), labels, planted)
