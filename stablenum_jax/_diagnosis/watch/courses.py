"""The course of a function: its good and bad results, one after another."""

from __future__ import annotations

from stablenum.commands.explain.session import Doubt

__all__ = ["Course"]


class Course:
    """The results of one function.

    Attributes:
        good: the number of finite results.
        bad: the number of bad results since the last finite one.
        doubt: the doubt of the first of these.
    """

    def __init__(self) -> None:
        self.good, self.bad, self._streaks = 0, 0, 0
        self.doubt: Doubt | None = None

    def note_good(self) -> None:
        """Count a finite result."""
        self.good, self.bad = self.good + 1, 0

    def begins_badly(self) -> bool:
        """Count a bad result, and return whether it is to be explained: the first after a finite one.

        The explanations become rarer, so that a script that skips many bad batches does not wait for them.
        """
        self.bad += 1
        self._streaks += self.bad == 1
        return self.bad == 1 and (self._streaks <= 8 or self._streaks & (self._streaks - 1) == 0)
