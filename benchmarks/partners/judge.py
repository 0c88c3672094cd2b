"""Judges what a training loop left behind after a bad batch. No framework is imported here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.partners.batches import BAD
from benchmarks.partners.outcome import Outcome, Row, State

__all__ = ["Verdict", "judge", "same_bits", "shown"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One row of the table.

    Attributes:
        finite: all parameters, moments and buffers are finite at the end.
        bit_equal: they have the same bits as after the run without the bad batch.
        visible: the log shows at the bad step that something was wrong with it.
        scheduler_held: the schedule ends where that of the run without the bad batch ends; None if it is
            constant.
        resumes: the run that was saved and resumed ends with the same bits; None if it was not tried.
    """

    finite: bool
    bit_equal: bool
    visible: bool
    scheduler_held: bool | None
    resumes: bool | None


def judge(outcome: Outcome) -> Verdict:
    """Return the verdict on a run with a bad batch.

    Raises:
        ValueError: the outcome has no reference, because the run had no bad batch.
    """
    reference = outcome.reference
    if reference is None:
        raise ValueError("outcome.reference must be the run without the bad batch; got None.")
    return Verdict(
        finite=all(bool(np.isfinite(part).all()) for part in outcome.state.values()),
        bit_equal=same_bits(outcome.state, reference.state),
        visible=shown(outcome.log, BAD),
        scheduler_held=_held(outcome.schedule, reference.schedule),
        resumes=None if outcome.resumed is None else same_bits(outcome.state, outcome.resumed),
    )


def _held(schedule: Sequence[float], reference: Sequence[float]) -> bool | None:
    return None if len({*schedule, *reference}) == 1 else schedule[-1] == reference[-1]


def same_bits(one: State, other: State) -> bool:
    """Return whether two states have the same names, dtypes, shapes and bits. A NaN equals itself."""
    if set(one) != set(other) or not one:
        return False
    pairs = [(np.asarray(one[name]), np.asarray(other[name])) for name in one]
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def shown(log: Sequence[Row], bad: int) -> bool:
    """Return whether the row of the bad step differs from the others as a reader would notice it.

    Some value there is not finite, or more than ten times as large as at any step before; or it is a word, a
    flag or a whole number (a code or a count of skips) that has never been seen before, where before it had
    only one value.
    """
    return any(_stands_out([row.get(name) for row in log[: bad + 1]]) for name in log[bad])


def _stands_out(values: Sequence[float | str | bool | None]) -> bool:
    *before, last = values
    if isinstance(last, str | bool) or last is None:
        return len(set(before)) == 1 and last not in before
    numbers = [float(x) for x in before if isinstance(x, int | float) and math.isfinite(x)]
    if not math.isfinite(last):
        return len(numbers) == len(before)
    if float(last).is_integer() and len(set(numbers)) == 1:
        return last not in numbers
    return bool(numbers) and abs(last) > 10 * max(map(abs, numbers))
