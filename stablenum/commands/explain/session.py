"""What a watcher talks to: it says what it saw, and the script is ended there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from stablenum.commands.explain.plan import Failure, Outcome, Plan
from stablenum.diagnosis import Report

__all__ = ["Session", "Stop"]


class Stop(BaseException):
    """Ends the script at its first failure. No ``except Exception`` of the script's catches it."""


class Session:
    """One run of a script.

    Attributes:
        plan: how it is run.
        outcome: what has been seen of it.
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
        """Whether a failure was found: a script that goes on all the same is left."""
        return self.outcome.failure is not None

    def leave(self) -> None:
        """The script caught the end and trains on: the process is left as it is, with the outcome written."""
        if self.on_leave is not None:
            self.on_leave()

    def found(self, failure: Failure, report: Report | None = None) -> NoReturn:
        """The first failure, explained if its step was recorded. Unwinds the script."""
        self.outcome.failure = failure
        self.outcome.report = None if report is None else report.to_dict()
        raise Stop
