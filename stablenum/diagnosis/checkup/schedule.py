"""Which steps of a script are measured in full: enough to see something, few enough to cost little."""

from __future__ import annotations

import time

__all__ = ["BY_HAND", "Schedule"]

# A checkup of one batch takes so many steps: with the forward pass after them and a trial, five passes.
BY_HAND = 3

# These steps are always measured. The number of each other one is at least so many times that of the last;
# together they take at most a part of the script's time. Chosen, not measured.
ALWAYS, APART, PART = (0, 1, 10, 100), 1.3, 0.25
# At most so many steps are measured. One that is measured within QUICK seconds counts as if there were always
# time for it; one within SLOW seconds is measured in any case once the number of the last has more than
# doubled. Chosen, not measured: docs/checkup.md has what it costs.
MOST, QUICK, SLOW = 40, 0.1, 0.25


class Schedule:
    """The time that measured steps have taken, in seconds of the whole process, with its imports.

    Args:
        most: how many steps are measured at most.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._spent = self._cost = self._began = 0.0

    def begin(self) -> None:
        """Note that measuring begins."""
        self._began = time.process_time()

    def end(self) -> None:
        """Note that measuring has ended."""
        self._cost = time.process_time() - self._began
        self._spent += self._cost

    def is_due(self, step: int, measured: int, last: int) -> bool:
        """Return whether it is time to measure a step.

        Args:
            step: the step's number.
            measured: how many steps have been measured.
            last: the number of the last of them.

        Example:
            >>> Schedule().is_due(2, measured=2, last=1), Schedule().is_due(100, measured=40, last=50)
            (True, False)
        """
        if measured >= self._most:
            return False
        if measured < len(ALWAYS) and step >= ALWAYS[measured]:
            return True
        rest = time.process_time() - self._spent
        cheap = self._cost < QUICK or self._spent < PART * rest
        return (cheap and step >= APART * last and step > last) or (self._cost < SLOW and step > 2 * last)
