"""The format ``"dcp"``: ``torch.distributed.checkpoint``, where every rank writes its part of a DTensor."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint

import stablenum
from stablenum.checkpoints.codec import Ranks, on_each
from stablenum.checkpoints.finiteness import NonFinite
from stablenum.checkpoints.structure import put_together, taken_apart
from stablenum.errors import CheckpointError
from stablenum_torch._devices.ranks import initialized, is_dtensor
from stablenum_torch._recovery.entries import nonfinite
from stablenum_torch._recovery.safetensors_file import is_tensor, read_plain, write_plain
from stablenum_torch._recovery.states import State

__all__ = ["DcpFolder"]

_PLAIN = "state-{:05d}.json"


class DcpFolder:
    """Writes tensors as ``torch.distributed.checkpoint`` does, and everything else of each rank as JSON.

    Args:
        ranks: the ranks that write together.
        group: their group; None for all, or for a process alone.
    """

    name = "dcp"

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None = None) -> None:
        self._ranks, self._group = ranks, group

    def versions(self) -> Mapping[str, str]:
        return {"stablenum": stablenum.__version__, "torch": torch.__version__}

    def write(self, folder: Path, state: State) -> None:
        def prepared() -> dict[str, Tensor]:
            plain, tensors = taken_apart(state.values, is_tensor)
            write_plain(folder / _PLAIN.format(self._ranks.rank), plain)
            return tensors

        tensors = on_each(self._ranks, prepared)
        # The store flushes the files.
        writer = checkpoint.FileSystemWriter(folder, sync_files=False)
        self._with_dcp(lambda: checkpoint.save(tensors, storage_writer=writer, **self._together()))

    def read(self, folder: Path, like: State) -> State:
        def prepared() -> tuple[Any, dict[str, Tensor]]:
            metadata = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
            current = taken_apart(like.values, is_tensor)[1]
            found = {name: _template(name, entry, current, like.objects) for name, entry in metadata.items()}
            return read_plain(self._own_plain(folder)), found

        try:
            plain, tensors = on_each(self._ranks, prepared)
            self._with_dcp(lambda: checkpoint.load(tensors, checkpoint_id=folder, **self._together()))
            return State(put_together(plain, tensors))
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"it cannot be read by torch.distributed.checkpoint: {error}") from error

    def nonfinite(self, state: State) -> list[NonFinite]:
        return nonfinite(state.values, state.buffers)

    def _own_plain(self, folder: Path) -> Path:
        own = folder / _PLAIN.format(self._ranks.rank)
        return own if own.exists() else folder / _PLAIN.format(0)  # written by fewer ranks

    def _together(self) -> dict[str, Any]:
        return {"process_group": self._group, "no_dist": not initialized()}

    def _with_dcp(self, action: Any) -> None:
        """Call a function of ``torch.distributed.checkpoint``.

        Raises:
            OSError: a file could not be written or read, on any rank.
            RuntimeError: it failed otherwise.
        """
        with warnings.catch_warnings():
            # What it says in one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                action()
            except checkpoint.CheckpointException as error:  # not an Exception, and so not caught elsewhere
                failures = [failure for failure, _ in error.failures.values()]
                on_disk = all(map(_of_the_disk, failures))
                kind = OSError if on_disk else RuntimeError
                raise kind(f"rank {min(error.failures)}: {failures[0]}") from error


def _of_the_disk(failure: BaseException) -> bool:
    # torch's writer hides the error of a file that takes no more behind a RuntimeError.
    hidden = isinstance(failure, RuntimeError) and "inline_container" in str(failure)
    return isinstance(failure, OSError) or hidden


def _template(name: str, entry: Any, current: Mapping[str, Tensor], objects: Mapping[str, Any]) -> Tensor:
    """Return memory into which a saved tensor is loaded: distributed as it is now, or plain on the host."""
    like = current.get(name)
    if like is None:
        like = _parameter_of(name, objects)
    if like is not None and is_dtensor(like) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _parameter_of(name: str, objects: Mapping[str, Any]) -> Tensor | None:
    """Return the parameter to which an entry of an optimizer's state belongs.

    An optimizer that has not taken a step has no state yet, and its state dict none to load into.
    """
    found = re.match(r"(.+?)\.state\.(\d+)\.", name)
    groups = getattr(objects.get(found[1]), "param_groups", None) if found else None
    if found is None or groups is None:
        return None
    params = [param for group in groups for param in group["params"]]
    return params[int(found[2])] if int(found[2]) < len(params) else None
