"""The faults, each planted so that it shows a given number of steps after its cause.

A fault *shows* at the first step whose loss is not what it would have been without the fault. Every fault
shows at step ``SHOWS``, where the rare source comes back after its quiet stretch, and its cause is ``delay``
steps earlier:

- Faults of the state are in what belongs to the rare source: its table, the table's moments, or its rate.
  They are planted in the quiet stretch, where no batch reads that table.
- Faults of what training never reads (batch norm's statistics, the averaged copy) show in no loss, but at the
  evaluation after that step.
- Faults of the data begin small and grow to their full size at that step. They show earlier in the last
  digits; it is measured from when on they stand out. At a delay of 1 the first bad batch is at its full size,
  and its own loss shows it at once: bad data cannot show later than they are read.
- Infinite and huge second moments stop the table from learning: they show in the last digits at that step,
  and no step ever stands out. A rate that is wrong for one step before ``SHOWS`` shows in its last digits
  there, and stands out a few steps later.

A fault of the state happens once: a run that goes back does not meet it again. A fault of the data is met by
every run that reads those batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.recovery.data import QUIET, Batch
from benchmarks.recovery.runs import Run

__all__ = ["DELAYS", "FAULTS", "SHOWS", "Planted", "nothing"]

DELAYS = (1, 10, 100)
SHOWS = QUIET[1]
STRETCH = 60  # batches that are bad from then on
TYPO = 50  # steps with a wrong rate

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Planted:
    """A fault in one run.

    Attributes:
        cause: the step before which it begins.
        events: what is done before the step of a number, counted over all steps that are made.
        batch: what is read at a position instead of a batch.
    """

    cause: int
    events: Mapping[int, Callable[[Run], None]]
    batch: Callable[[int, Batch], Batch] = lambda position, batch: batch

    def before(self, run: Run, made: int) -> None:
        """Do what happens to a run after ``made`` steps."""
        if made in self.events:
            self.events[made](run)


def nothing() -> Planted:
    """No fault."""
    return Planted(0, {})


# --- the state ------------------------------------------------------------------------------------------


def _once(what: str, change: Callable[[Array], Array], shows: int = SHOWS) -> Callable[[int], Planted]:
    """An array of the state is changed before a step."""
    return lambda delay: Planted(shows - delay, {shows - delay: lambda run: run.edit(what, change)})


def _negative(v: Array) -> Array:
    """Second moments that have lost their sign: the next update makes NaN of the weights."""
    return -np.abs(v) - np.float32(1e-12)


def flipped(weights: Array, bit: int = 30) -> Array:
    """Flip a bit of the first element; bit 30 is the highest of the exponent.

    Example:
        >>> flipped(np.float32([0.5, 0.5])).tolist()
        [1.7014118346046923e+38, 0.5]
    """
    weights = np.ascontiguousarray(weights)
    weights.reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << bit)
    return weights


def _stale_moments(delay: int) -> Planted:
    """Second moments of before a rise of the gradients: each m is 10,000 times the root of its v.

    The first moments are those of the rise. Each weight moves by thousands of times the rate until they have
    died down, as no new gradient comes in the quiet stretch.
    """

    def stale(run: Run) -> None:
        run.edit("m", lambda m: np.where(m < 0, -1e-3, 1e-3).astype(m.dtype))
        run.edit("v", lambda v: np.full_like(v, 1e-14))

    return Planted(SHOWS - delay, {SHOWS - delay: stale})


def _nan_first(values: Array) -> Array:
    """One value turns NaN. If it is an average of itself and of new values, it stays so."""
    values.reshape(-1)[0] = np.nan
    return values


# --- the rate -------------------------------------------------------------------------------------------


def _rate_in_the_state(delay: int) -> Planted:
    """The rare table's rate is multiplied by 100, in the optimizer's own settings, and mended 50 steps later.

    The settings are saved and restored with the state, so that a run that goes back has the right rate again.
    """
    start = SHOWS - delay
    return Planted(
        start, {start: lambda run: run.set_rate(100.0), start + TYPO: lambda run: run.set_rate(1.0)}
    )


def _rate_outside(delay: int) -> Planted:
    """The same from outside, for 50 steps that are made, whether or not the run goes back in between."""

    def rate(factor: float) -> Callable[[Run], None]:
        return lambda run: setattr(run, "outside", factor)

    start = SHOWS - delay
    return Planted(start, {start: rate(100.0), start + TYPO: rate(1.0)})


# --- the data -------------------------------------------------------------------------------------------


def _severity(position: int, delay: int) -> float:
    """From 0 to 1, in ``delay`` batches up to ``SHOWS``, as a 16th power; then 1 for the stretch."""
    if not SHOWS - delay <= position < SHOWS + STRETCH:
        return 0.0
    return min(1.0, (position - (SHOWS - delay) + 1) / delay) ** 16


def _shuffled_labels(delay: int) -> Planted:
    """A growing share of the rows, and then all, have the targets of other rows."""

    def batch(position: int, batch: Batch) -> Batch:
        rng = np.random.default_rng(position)
        wrong = rng.random(len(batch.targets)) < _severity(position, delay)
        shuffled = rng.permuted(batch.targets.reshape(-1)).reshape(batch.targets.shape)
        shape = (-1, *[1] * (batch.targets.ndim - 1))
        return batch._replace(targets=np.where(wrong.reshape(shape), shuffled, batch.targets))

    return Planted(SHOWS - delay, {}, batch)


def _large_values(delay: int) -> Planted:
    """Values multiplied by a factor that grows to 10,000: pixels, or the weights of texts.

    A tenth of the rows are affected: batch norm would make nothing of a factor that all rows have.
    """

    def batch(position: int, batch: Batch) -> Batch:
        rows = np.random.default_rng(position).random(len(batch.targets)) < 0.1
        factor = np.where(rows, 10.0 ** (4.0 * _severity(position, delay)), 1.0).astype(np.float32)
        if batch.inputs.dtype == np.float32:
            return batch._replace(inputs=batch.inputs * factor[:, None])
        return batch._replace(weights=batch.weights * factor)

    return Planted(SHOWS - delay, {}, batch)


FAULTS: dict[str, Callable[[int], Planted]] = {
    "negative second moments": _once("v", _negative),
    "infinite second moments": _once("v", lambda v: np.full_like(v, np.inf)),
    "huge second moments": _once("v", lambda v: np.full_like(v, 1e30)),
    "stale second moments": _stale_moments,
    "flipped exponent bit": _once("rare", flipped),
    # Before the step after which the evaluation comes.
    "NaN statistics": _once("statistics", _nan_first, shows=SHOWS + 1),
    "shuffled labels": _shuffled_labels,
    "values x 1e4": _large_values,
    "rate x 100, in the state": _rate_in_the_state,
    "rate x 100, from outside": _rate_outside,
}
