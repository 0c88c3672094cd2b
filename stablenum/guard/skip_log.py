"""Log messages about steps that are skipped one after the other, at most a few per run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, cast

from stablenum.guard.decide import GuardState
from stablenum.guard.halting import first_bad_parameter
from stablenum.guard.readout import Metrics, StepRecord
from stablenum.guard.reasons import EXPLANATIONS, Reason, explain_reason
from stablenum.guard.recorder import CAPACITY

__all__ = ["SkipLog", "SkipLogs"]

_FIRST = 3  # a dynamic loss scale comes down by a step or two now and then
_QUIET = 1000  # steps between messages about the beginnings of two runs of skips

_TRAININGS = 64  # so many are told apart; cross-validation and ensembles rarely have more

_logger = logging.getLogger("stablenum")


class SkipLog:
    """Logs a warning at 3 skipped steps in a row, and again at 30, 300, 3000...

    After a message, further runs of skips are not mentioned for 1000 steps before they reach 30. The likely
    cause and the remedy are in the first message about each reason.
    """

    def __init__(self) -> None:
        self._next = _FIRST
        self._in_a_row = self._step = self._quiet_until = 0
        self._explained: dict[Reason, int] = {}  # and in the message about which step
        self._halt = -1  # the step of the halt that is known to the user

    def after_step(self, in_a_row: int, step: int, last: Callable[[], Metrics]) -> None:
        """Log a warning if one is due.

        Args:
            in_a_row: the number of steps skipped in a row, after any step.
            step: the number of steps so far.
            last: returns the last step's metrics; called only for a message.
        """
        if step < self._step:  # another run, with a new state
            self._quiet_until = 0
            self._explained.clear()
        if in_a_row < self._in_a_row:  # steps were applied in between
            self._next = _FIRST
        self._in_a_row, self._step = in_a_row, step
        if in_a_row < self._next or (in_a_row < 10 * _FIRST and step < self._quiet_until):
            return
        while self._next <= in_a_row:
            self._next *= 10
        self._quiet_until = step + _QUIET
        _logger.warning(self._message(last()))

    def after_read(self, last: Metrics) -> None:
        """Log a warning if one is due, given the metrics of the last step."""
        self.after_step(last["skipped_in_a_row"], last["step"] + 1, lambda: last)

    def after_steps(self, rows: Sequence[StepRecord], last: Metrics) -> None:
        """Log a warning for each run of skips that is due, of steps that only their records tell of.

        Args:
            rows: the recorded steps, which may have been seen before.
            last: the metrics of the last of them.
        """
        seen = self._step if last["step"] + 1 >= self._step else 0
        for applied, steps in groupby(rows, lambda row: row["applied"]):
            run = list(steps)
            row, length = run[-1], 0 if applied else len(run)
            if row["step"] == last["step"]:
                length = last["skipped_in_a_row"]  # it may have begun before the first of these rows
            if row["step"] >= seen:
                self.after_read(cast("Metrics", {**last, **row, "skipped_in_a_row": length}))

    def after_halt(self, step: int, message: str = "") -> None:
        """Log ``message`` as a warning, unless this halt is known. Without one, the user knows it already."""
        known, self._halt = self._halt == step, step
        if message and not known:
            _logger.warning(message)

    def _message(self, last: Metrics) -> str:
        n, step = last["skipped_in_a_row"], last["step"]
        return (
            f"{n} steps in a row were skipped, up to step {step}. {first_bad_parameter(last)} "
            f"At step {step} {self._explanation(last['reason'], step)} Loss scale: {last['loss_scale']:g}."
        )

    def _explanation(self, reason: Reason, step: int) -> str:
        before = self._explained.setdefault(reason, step)
        if before == step:
            return explain_reason(reason)
        what = EXPLANATIONS[reason].what
        return f"{what} ({reason.name}; for cause and remedy see the message at step {before})."


class SkipLogs:
    """A log of skips for each training of equal models, which only the records in their states tell apart.

    Trainings whose records are the same, bit for bit, share a log. If no step is in the records of two
    states, they may belong to one training if their counts allow it.
    """

    def __init__(self) -> None:
        self._trainings: list[tuple[_Seen, SkipLog]] = []  # that seen last is last

    def of(self, state: GuardState) -> SkipLog:
        """Return the log of the training that a state, in NumPy, belongs to: a new one if to no other."""
        seen = _seen(state)
        at = next((i for i, (last, _) in reversed([*enumerate(self._trainings)]) if _agree(last, seen)), None)
        if at is None:
            at = next((i for i, (last, _) in enumerate(self._trainings) if _may_follow(last, seen)), None)
        log = SkipLog() if at is None else self._trainings.pop(at)[1]
        self._trainings = [*self._trainings, (seen, log)][-_TRAININGS:]
        return log


class _Seen(NamedTuple):
    """What tells trainings apart: the number of the last recorded step, the bits of the records and the
    counts."""

    step: int
    records: tuple[bytes, bytes]
    skipped: int
    in_a_row: int


def _seen(state: GuardState) -> _Seen:
    floats, ints = state.recorder
    counts = state.skipped_total.tolist(), state.skipped_in_a_row.tolist()
    return _Seen(ints[-1, 0].tolist(), (floats.tobytes(), ints.tobytes()), *counts)


def _agree(one: _Seen, other: _Seen) -> bool:
    """Return whether steps are in the records of both, and are the same."""
    earlier, later = sorted((one, other), key=lambda seen: seen.step)
    steps = later.step - earlier.step
    return steps < CAPACITY and all(
        was[len(was) // CAPACITY * steps :] == now[: len(now) // CAPACITY * (CAPACITY - steps)]
        for was, now in zip(earlier.records, later.records, strict=True)
    )


def _may_follow(before: _Seen, after: _Seen) -> bool:
    """Return whether a state may be a later one of a training, by its counts, if no step is in the records of
    both."""
    steps, skips = after.step - before.step, after.skipped - before.skipped
    run = skips + (before.in_a_row if skips == steps else 0)  # the longest that may have led here
    return steps >= CAPACITY and 0 <= skips <= steps and after.in_a_row <= run
