"""The snapshots on the disk: those in memory, whole and verified, each rank's part in a folder of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stablenum.checkpoints.codec import Codec
from stablenum.checkpoints.folders import Listings, check_kind, found_in, intact_in, remove
from stablenum.checkpoints.settings import StoreSettings
from stablenum.checkpoints.store import Store
from stablenum.errors import CheckpointError
from stablenum.recovery.snapshots import Snapshot

__all__ = ["Spilled", "Together"]

_logger = logging.getLogger("stablenum")
# What is in a snapshot has been searched, and parts of it may be not finite on purpose.
_SETTINGS = StoreSettings(keep=None, on_error="go on", allow=("*",))
_OF_RANK = "rank-{:05d}"
_KIND = "snapshot"
_FIELDS = {"ranks", "step", "state", "data", "course"}


class Together(Protocol):
    """The ranks that go back together.

    Attributes:
        position: this rank's number, from 0.
        size: how many there are.
    """

    position: int
    size: int

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank has, in the order of the ranks; called by all."""


class Spilled:
    """The snapshots in a folder.

    Args:
        folder: the folder; it is made when the first snapshot is saved.
        ranks: the ranks that go back together.
        codec: writes and reads a dict of plain values and arrays.
        to_plain: returns plain values and arrays for what the adapter captured.
        from_plain: returns what the adapter would have captured.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Together,
        codec: Codec,
        *,
        to_plain: Callable[[Any], Mapping[str, Any]],
        from_plain: Callable[[Mapping[str, Any]], Any],
    ) -> None:
        self._whole, self._ranks = folder, ranks
        self._to_plain, self._from_plain = to_plain, from_plain
        self._folder = folder if ranks.size == 1 else folder / _OF_RANK.format(ranks.position)
        self._store = Store(self._folder, codec, _SETTINGS, kind=_KIND)

    def save(self, snapshot: Snapshot, held: Sequence[int]) -> None:
        """Write a snapshot, and remove those of steps that are not in ``held``.

        If the disk is full or cannot be written, a warning is logged, and what is there stays.

        Raises:
            CheckpointError: the folder has checkpoints in it that are no snapshots; all stay.
            TypeError: the state of the data or of something else holds what cannot be loaded safely.
        """
        if self._whole != self._folder:
            check_kind(self._whole, _KIND)
        plain = {
            "ranks": self._ranks.size,
            "step": snapshot.step,
            "state": self._to_plain(snapshot.state),
            "data": snapshot.position,
            "course": snapshot.course,
        }
        if self._store.save(snapshot.step, plain) is None:
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
        listings = Listings()
        while True:
            written = [manifest.step for _, manifest in intact_in(self._folder)]
            if not written:
                if found_in(self._folder):
                    raise CheckpointError(f"none in {self._folder} is whole")
                return []
            loaded, reasons = self._whole_ones(written)
            newest = bool(loaded) and loaded[-1].step == written[-1]
            if newest or not listings.changed(written):
                break
        if not loaded:
            raise CheckpointError("; ".join(reasons))
        for why in reasons:
            _logger.warning(f"A snapshot is passed over: {why}")
        return loaded

    def _whole_ones(self, written: Sequence[int]) -> tuple[list[Snapshot], list[str]]:
        """Return the snapshots of these steps, in the order of writing, that are whole, and why others are
        not."""
        # After a rewind, what is newer than the snapshot written last may not have been removed yet.
        steps = sorted({step for step in written if step <= written[-1]})
        loaded: list[Snapshot] = []
        reasons: list[str] = []
        for step in steps:
            try:
                loaded.append(self._loaded(step))
            except CheckpointError as error:
                reasons.append(str(error))
        return loaded, reasons

    def _loaded(self, step: int) -> Snapshot:
        loaded = self._store.load(None, step)
        plain: dict[str, Any] = loaded.state
        if not plain.keys() >= _FIELDS:
            raise CheckpointError(f"{loaded.folder.name} is a checkpoint, not a snapshot of a recovery")
        self._store.adopted.add(loaded.folder.name)
        if plain["ranks"] != self._ranks.size:
            raise CheckpointError(self._of_others(plain["ranks"]))
        return Snapshot(step, self._from_plain(plain["state"]), plain["data"], plain["course"])

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
