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
from stablenum.checkpoints.structure import array_names, put_together, taken_apart
from stablenum.errors import CheckpointError
from stablenum_torch._devices.ranks import initialized, is_dtensor
from stablenum_torch._recovery.entries import leaves, nonfinite
from stablenum_torch._recovery.safetensors_file import is_tensor, read_plain, write_plain
from stablenum_torch._recovery.states import State

__all__ = ["DcpFolder"]

_PLAIN, _OWN = "state-{:05d}.json", "rank {}/{}"


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
            shared = _shared(state.objects)
            return {_place(n, t, shared, self._ranks.rank): t for n, t in tensors.items()}

        tensors = on_each(self._ranks, prepared)
        # The store flushes the files.
        writer = checkpoint.FileSystemWriter(folder, sync_files=False)
        self._with_dcp(lambda: checkpoint.save(tensors, storage_writer=writer, **self._together()))

    def read(self, folder: Path, like: State) -> State:
        def prepared() -> tuple[Any, dict[str, str], dict[str, Tensor]]:
            entries = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
            current = {name: leaf for name, leaf in leaves(like.values) if is_tensor(leaf)}
            # Where fewer ranks have saved, the others get what rank 0 had.
            rank = self._ranks.rank if (folder / _PLAIN.format(self._ranks.rank)).exists() else 0
            plain = read_plain(folder / _PLAIN.format(rank))
            own = {name: _OWN.format(rank, name) for name in array_names(plain)}
            places = {name: place if place in entries else name for name, place in own.items()}
            into = {p: _template(n, entries[p], current, like.objects) for n, p in places.items()}
            return plain, places, into

        try:
            plain, places, into = on_each(self._ranks, prepared)
            self._with_dcp(lambda: checkpoint.load(into, checkpoint_id=folder, **self._together()))
            return State(put_together(plain, {name: into[place] for name, place in places.items()}))
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"it cannot be read by torch.distributed.checkpoint: {error}") from error

    def nonfinite(self, state: State) -> list[NonFinite]:
        return nonfinite(state.values, state.kinds)

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
                raise kind(f"rank {min(error.failures)}: {_told(failures[0])}") from error


def _shared(objects: Mapping[str, Any]) -> tuple[str, ...]:
    """Return how the names begin of entries that all ranks have alike: those of models and optimizers."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return tuple(f"{name}." for name, value in objects.items() if isinstance(value, kinds))


def _place(name: str, tensor: Tensor, shared: tuple[str, ...], rank: int) -> str:
    """Return the name under which a tensor is saved.

    Ranks have generators, and positions in the data, of their own: of tensors with the same name, DCP would
    save the first rank's.
    """
    return name if name.startswith(shared) or is_dtensor(tensor) else _OWN.format(rank, name)


def _is_hidden(failure: BaseException) -> bool:
    """Return whether torch's writer hides the error of a file that takes no more."""
    return isinstance(failure, RuntimeError) and "inline_container" in str(failure)


def _of_the_disk(failure: BaseException) -> bool:
    return isinstance(failure, OSError) or _is_hidden(failure)


def _told(failure: BaseException) -> str:
    said = str(failure).strip()
    return f"a file takes no more (no space left, or a quota): {said}" if _is_hidden(failure) else said


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
