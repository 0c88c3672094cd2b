"""Snapshots: the states that a run can go back to, and which of them are good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Snapshot", "Snapshots"]


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

    Args:
        keep: how many are held; one more, if the newest good one is older than these.
        good_after: steps without a symptom after which a snapshot is good.
    """

    def __init__(self, keep: int, good_after: int) -> None:
        self._keep, self._good_after = keep, good_after
        self._held: list[Snapshot] = []

    def __len__(self) -> int:
        return len(self._held)

    def steps(self) -> list[int]:
        """Return the steps of the snapshots, oldest first."""
        return [snapshot.step for snapshot in self._held]

    def add(self, snapshot: Snapshot) -> None:
        """Hold a snapshot, in place of one of the same step; the oldest that are no longer needed go."""
        self.drop_from(snapshot.step)
        self._held.append(snapshot)
        good = self.good_before(snapshot.step + 1)[:1]
        newest = self._held[-self._keep :]
        self._held = [s for s in self._held if s in newest or s in good]

    def drop_from(self, step: int) -> None:
        """Drop the snapshots of this step and of later ones."""
        self._held = [snapshot for snapshot in self._held if snapshot.step < step]

    def good_before(self, origin: int) -> list[Snapshot]:
        """Return those that a fault first seen at the step ``origin`` cannot have reached, newest first.

        If there is none, the oldest is the best there is.
        """
        newest_first = self._held[::-1]
        return [s for s in newest_first if s.step + self._good_after < origin] or newest_first[-1:]
