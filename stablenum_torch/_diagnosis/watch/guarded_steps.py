"""The steps that guards skip in a watched script: in doubt until the guard has applied others."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from stablenum.diagnosis import Report
from stablenum.diagnosis.watch.courses import Course
from stablenum.diagnosis.watch.plan import Failure
from stablenum.diagnosis.watch.session import Doubt, Session
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Found", "GuardedSteps"]

Found: TypeAlias = tuple[Failure, Report | None]


class _Pending(NamedTuple):
    """A step that a guard has not decided yet.

    Attributes:
        found: what is bad; None if that was not explained.
        known: whether the guard knows, because it is the loss that it was given.
    """

    found: Found | None
    known: bool


class GuardedSteps:
    """Follows the steps of guards, each of which has its own course."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._courses: weakref.WeakKeyDictionary[torch.optim.Optimizer, Course] = weakref.WeakKeyDictionary()
        self._pending: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Pending] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def loss_known(self) -> bool:
        """Whether a guard has been given the bad loss of the step that is being prepared."""
        return any(pending.known for pending in self._pending.values())

    @property
    def unsettled(self) -> bool:
        """Whether a guard skips and has not applied a step since."""
        return any(course.bad and course.doubt for course in self._courses.values())

    def expect_skip(
        self, optimizer: GuardedOptimizer, explained: Callable[[], Found], *, known: bool = False
    ) -> None:
        """Doubt the step that a guard prepares or takes, because something in it is bad.

        Args:
            optimizer: the guard.
            explained: returns what is bad; called for the first of several steps in a row.
            known: whether the guard has been given the bad loss.

        Raises:
            Stop: there were too many such steps in a row.
        """
        before = self._pending.get(optimizer)
        if before is not None:  # its loss was bad, too
            self._pending[optimizer] = before._replace(known=before.known and known)
            return
        course = self._courses.setdefault(optimizer, Course())
        found = None
        course.begins_badly()
        if course.bad == 1:  # the first of each row: only a recorded step costs anything here
            found, since = explained(), course.good
            course.doubt = Doubt(*found, lambda: course.recovered(since))
            self._session.doubt(course.doubt)
        self._pending[optimizer] = _Pending(found, known)
        if course.hopeless and course.doubt is not None:
            self._session.give_up(course.doubt)

    def ended(self, optimizer: GuardedOptimizer) -> Found | None:
        """Note how a step has ended; return what was bad if the guard has applied it all the same."""
        pending = self._pending.pop(optimizer, None)
        if optimizer.step_was_skipped:
            return None
        course = self._courses.setdefault(optimizer, Course())
        if pending is None or pending.known:  # without a loss that was dropped
            course.note_good()
            return None
        return pending.found or (None if course.doubt is None else course.doubt[:2])
