"""Snapshots: the states that a run can go back to, and which of them are good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["YOUNG", "Snapshot", "Snapshots"]

YOUNG = 4  # snapshots that are not yet good are held, at most


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: states may be arrays
class Snapshot:
    """A state of the run.

    Attributes:
        step: how many steps had been made.
        state: what the adapter captured.
        position: where the run was in its data.
        course: what the loop knew: plain values for JSON.
    """

    step: int
    state: Any
    position: Any
    course: dict[str, Any]


class Snapshots:
    """The snapshots in memory, oldest first.

    Those that are not yet good must be held to become good. Where there are many, some in the middle are
    dropped, but never the oldest, so that good ones keep coming.

    Args:
        keep: how many good ones are held.
        good_after: steps without a symptom after which a snapshot is good.
    """

    def __init__(self, keep: int, good_after: int) -> None:
        self._keep, self._good_after = keep, good_after
        self._held: list[Snapshot] = []
        self.confirmed = -1  # the last step whose snapshot has been found good; it stays so

    def __len__(self) -> int:
        return len(self._held)

    def steps(self) -> list[int]:
        """Return the steps of the snapshots, oldest first."""
        return [snapshot.step for snapshot in self._held]

    def add(self, snapshot: Snapshot) -> None:
        """Hold a snapshot, in place of one of the same step or later; those no longer needed go."""
        self.drop_from(snapshot.step)
        self._held.append(snapshot)
        good = [s for s in self._held if self._is_good(s, snapshot.step + 1)]
        young = self._held[len(good) :]
        self._held = good[-self._keep :] + young[:1] + young[1:][-(YOUNG - 1) :]

    def drop_from(self, step: int) -> None:
        """Drop the snapshots of this step and of later ones."""
        self._held = [snapshot for snapshot in self._held if snapshot.step < step]

    def confirm_before(self, origin: int) -> None:
        """Note that snapshots were good when a symptom came: they stay good after the run has gone back."""
        good = [s.step for s in self._held if self._is_good(s, origin)]
        self.confirmed = max([self.confirmed, *good])

    def good_before(self, origin: int) -> list[Snapshot]:
        """Return those that a fault first seen at the step ``origin`` cannot have reached, newest first.

        If there is none, the oldest is the best there is.
        """
        newest_first = self._held[::-1]
        return [s for s in newest_first if self._is_good(s, origin)] or newest_first[-1:]

    def _is_good(self, snapshot: Snapshot, origin: int) -> bool:
        waited = 0 if snapshot.step <= self.confirmed else self._good_after
        return snapshot.step + waited < origin
