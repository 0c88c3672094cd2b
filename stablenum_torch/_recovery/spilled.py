"""The snapshots of a training in PyTorch on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stablenum.checkpoints.finiteness import NonFinite
from stablenum.recovery.spilled import Spilled
from stablenum_torch._recovery.state import Captured
from stablenum_torch._recovery.states import State
from stablenum_torch._recovery.together import Together
from stablenum_torch._recovery.torch_file import TorchFile
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["spilled"]


def spilled(folder: Path, ranks: Together, opt: GuardedOptimizer) -> Spilled:
    """Return the snapshots in a folder.

    Args:
        folder: the folder; it is made when the first snapshot is saved.
        ranks: the ranks that go back together.
        opt: the guarded optimizer.
    """
    return Spilled(
        folder,
        ranks,
        _SnapshotFile(),
        to_plain=lambda captured: captured.to_plain(opt),
        from_plain=Captured.from_plain,
    )


class _SnapshotFile:
    """Writes a dict of plain values and tensors as :class:`TorchFile` does."""

    name = TorchFile.name

    def __init__(self) -> None:
        self._file = TorchFile()
        self.versions = self._file.versions

    def write(self, folder: Path, state: Any) -> None:
        self._file.write(folder, State(state))

    def read(self, folder: Path, like: object) -> Any:
        return self._file.read(folder, State({})).values

    def nonfinite(self, state: Any) -> list[NonFinite]:
        return self._file.nonfinite(State(state))
