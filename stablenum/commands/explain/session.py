"""The interface to which a watcher reports what it sees; a failure stops the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from stablenum.commands.explain.plan import Failure, Outcome, Plan
from stablenum.diagnosis import Report

__all__ = ["Session", "Stop"]


class Stop(BaseException):
    """Stops the script at its first failure; ``except Exception`` in the script does not catch it."""


class Session:
    """One run of a script.

    Attributes:
        plan: how the script is run.
        outcome: what has been seen so far.
        on_error: called with an exception that ends the script.
        on_leave: ends the process.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self.on_error: list[Callable[[BaseException], None]] = []
        self.on_leave: Callable[[], None] | None = None

    @property
    def over(self) -> bool:
        """Whether a failure has been found. If the script continues regardless, it is no longer watched."""
        return self.outcome.failure is not None

    def leave(self) -> None:
        """Write the outcome and end the process, because the script caught :class:`Stop` and trains on."""
        if self.on_leave is not None:
            self.on_leave()

    def found(self, failure: Failure, report: Report | None = None) -> NoReturn:
        """Record the first failure, with its report if the step was recorded, and stop the script."""
        self.outcome.failure = failure
        self.outcome.report = None if report is None else report.to_dict()
        raise Stop
