"""The snapshots on the disk: those in memory, whole and verified, each rank's part in a folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stablenum.checkpoints.folders import found_in, intact_in, remove
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.errors import CheckpointError
from stablenum.recovery.snapshots import Snapshot
from stablenum_torch._recovery.state import Captured
from stablenum_torch._recovery.states import State
from stablenum_torch._recovery.together import Together
from stablenum_torch._recovery.torch_file import TorchFile
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Spilled"]

_logger = logging.getLogger("stablenum")
# What is in a snapshot has been searched, and parts of it may be not finite on purpose.
_SETTINGS = StoreSettings(keep=None, on_error="go on", allow=("*",))
_OF_RANK = "rank-{:05d}"


class Spilled:
    """The snapshots in a folder.

    Args:
        folder: the folder; it is made when the first snapshot is saved.
        ranks: the ranks that go back together.
        opt: the guarded optimizer.
    """

    def __init__(self, folder: Path, ranks: Together, opt: GuardedOptimizer) -> None:
        self._whole, self._ranks, self._opt = folder, ranks, opt
        self._folder = folder if ranks.size == 1 else folder / _OF_RANK.format(ranks.position)
        self._store = Store(self._folder, TorchFile(), _SETTINGS)

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Write a snapshot, and remove those of steps that are not in ``held``.

        If the disk is full or cannot be written, a warning is logged, and what is there stays.

        Raises:
            TypeError: the state of the data or of something else holds what cannot be loaded safely.
        """
        plain = {
            "ranks": self._ranks.size,
            "step": snapshot.step,
            "state": snapshot.state.to_plain(self._opt),
            "data": snapshot.position,
            "course": snapshot.course,
        }
        if self._store.save(snapshot.step, State(plain)) is None:
            return
        try:
            for found in found_in(self._folder):
                if found.step not in held:
                    remove(found.folder, self._folder)
        except OSError as error:
            _logger.warning(f"a snapshot in {self._folder} that is no longer needed is still there: {error}")

    def load(self) -> list[Snapshot]:
        """Return the snapshots that all ranks have, oldest first; none if there is none.

        Raises:
            CheckpointError: there are some, but none that is whole on all ranks.
        """
        found: dict[tuple[int, int], Snapshot] = {}
        reason: str | None = None
        try:
            found = {(s.step, s.course["rewinds"]): s for s in self._own()}
        except (CheckpointError, OSError) as error:
            reason = str(error)
        every = self._ranks.gathered((list(found), reason))
        common = set(found).intersection(*(keys for keys, _ in every))
        if common:
            return [found[key] for key in sorted(common)]
        reasons = {f"rank {i}": why for i, (_, why) in enumerate(every) if why is not None}
        if reasons or any(keys for keys, _ in every):
            told = "; ".join(dict.fromkeys(reasons.values())) or "the ranks have snapshots of different steps"
            raise CheckpointError(
                f"no snapshot in {self._whole} can be loaded: {told}. Nothing was changed. "
                "To begin from step 0, give another folder.",
                reasons=reasons,
            )
        return []

    def _own(self) -> list[Snapshot]:
        """Return this rank's snapshots that are whole, oldest first."""
        self._check_ranks()
        written = [manifest.step for _, manifest in intact_in(self._folder)]
        if not written:
            if found_in(self._folder):
                raise CheckpointError(f"none in {self._folder} is whole")
            return []
        # After a rewind, what is newer than the snapshot written last may not have been removed yet.
        steps = sorted({step for step in written if step <= written[-1]})
        loaded: list[Snapshot] = []
        reasons: list[str] = []
        for step in steps:
            try:
                loaded.append(self._loaded(step))
            except CheckpointError as error:
                reasons.append(str(error))
        if not loaded:
            raise CheckpointError("; ".join(reasons))
        for why in reasons:
            _logger.warning(f"A snapshot is passed over: {why}")
        return loaded

    def _loaded(self, step: int) -> Snapshot:
        plain: dict[str, Any] = self._store.load(None, step).state.values
        if plain["ranks"] != self._ranks.size:
            raise CheckpointError(self._of_others(plain["ranks"]))
        return Snapshot(step, Captured.from_plain(plain["state"]), plain["data"], plain["course"])

    def _check_ranks(self) -> None:
        """Check that the snapshots were written by as many ranks as there are now.

        Raises:
            CheckpointError: they were not.
        """
        others = len(list(self._whole.glob("rank-*")))
        if self._ranks.size == 1 and others:
            raise CheckpointError(self._of_others(others))
        if self._ranks.size > 1 and found_in(self._whole):
            raise CheckpointError(self._of_others(1))

    def _of_others(self, count: int) -> str:
        written_by = "1 rank" if count == 1 else f"{count} ranks"
        return f"they were written by {written_by}, and there are {self._ranks.size}"
