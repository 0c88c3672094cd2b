"""When a script copes with bad results, and when it does not: the rule is the same for all frameworks.

What is bad is passed by if good results follow it. It is a failure if the script ends before that is clear,
or after too many bad results in a row. This holds for a function that is called again and again, and for the
steps of a guard: one that it skips does no harm if it applies others afterwards.
"""

from __future__ import annotations

from stablenum.diagnosis.watch.session import Doubt

__all__ = ["GOOD", "MOST_IN_A_ROW", "Course"]

# After so many bad results in a row, nothing is taken to recover.
MOST_IN_A_ROW = 25
# So many good results in all, one of them after the bad one, show that the script copes with bad ones.
GOOD = 3


class Course:
    """The results of one function, or the steps of one guard.

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

    @property
    def hopeless(self) -> bool:
        """Whether there were too many bad results in a row."""
        return self.bad >= MOST_IN_A_ROW and self.doubt is not None

    def recovered(self, since: int, others: int = 0) -> bool:
        """Return whether good results followed a bad one.

        Args:
            since: the number of good results before the bad one.
            others: the number of good results of other functions that train, since the bad one.

        Example:
            >>> course = Course()
            >>> for _ in range(2):
            ...     course.note_good()
            >>> course.begins_badly(), course.recovered(since=2)
            (True, False)
            >>> course.note_good()
            >>> course.recovered(since=2)
            True
        """
        return self.good > since and (self.good >= GOOD or others >= GOOD)
