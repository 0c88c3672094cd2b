"""Log messages about steps that are skipped one after the other, at most a few per run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import cast

from stablenum.guard.halting import first_bad_parameter
from stablenum.guard.readout import Metrics, StepRecord
from stablenum.guard.reasons import EXPLANATIONS, Reason, explain_reason

__all__ = ["SkipLog"]

_FIRST = 3  # a dynamic loss scale comes down by a step or two now and then
_QUIET = 1000  # steps between messages about the beginnings of two runs of skips

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
