"""Find the recorded value that a tensor has at the moment.

Many tensor objects share the same memory: views, detached copies, tensors that autograd has saved and
unpacked. A value therefore belongs to a place in a storage (offset, shape, strides) and to the number of
writes to that storage so far. Weak references keep the address of a freed storage from being reused
unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from stablenum.diagnosis.replay.trace import Step

__all__ = ["Memory", "Storage", "is_freed", "view_key"]

View = tuple[Any, ...]


@dataclass(slots=True)
class Storage:
    """What is known of one storage.

    Attributes:
        reference: keeps the address unique.
        outside: whether it existed before the replay.
        epoch: how many operations have written to it.
        views: for each place, the value last seen there and the epoch at that time.
        writes: (epoch, value) of each write.
        unwritten: the value of the memory while it is uninitialised.
        doubtful: whether it may have been written while nothing was recorded.
        pending: the collectives that write to it and may not have ended, each with the tensor that it writes.
    """

    reference: Any
    outside: bool = False
    epoch: int = 0
    views: dict[View, tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)
    unwritten: int | None = None
    doubtful: bool = False
    pending: list[tuple[Step, Tensor]] = field(default_factory=list)

    def current(self, view: View) -> int | None:
        """Return the value at a place; None if the storage has changed since, or the place was never read."""
        seen = self.views.get(view)
        return seen[0] if seen is not None and seen[1] == self.epoch else None

    def sources(self, view: View) -> list[int]:
        """Return the values that make up the present value at a place: the last value seen there, and later
        writes."""
        seen = self.views.get(view)
        if seen is None:
            found = [value for value, _ in self.views.values()] + [value for _, value in self.writes]
        else:
            found = [seen[0]] + [value for epoch, value in self.writes if epoch > seen[1]]
        return sorted(set(found))


class Memory:
    """All storages that a replay has seen."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}

    def find(self, tensor: Tensor) -> Storage | None:
        """Return the storage, if it is known."""
        return self._storages.get(_address(tensor))

    def add(self, tensor: Tensor, *, outside: bool) -> Storage:
        """Register a storage that is not known yet."""
        address = _address(tensor)
        reference = tensor if address < 0 else StorageWeakRef(_dense(tensor).untyped_storage())
        found = self._storages[address] = Storage(reference=reference, outside=outside)
        return found

    def take_up(self, tensor: Tensor, known: Storage) -> None:
        """Register the storage of a tensor, of which is known what is known of another one."""
        known.reference = self.add(tensor, outside=known.outside).reference
        self._storages[_address(tensor)] = known

    def keep(self, wanted: Callable[[Storage], bool]) -> None:
        """Forget all storages but those that are wanted, which become doubtful."""
        self._storages = {address: s for address, s in self._storages.items() if wanted(s)}
        for storage in self._storages.values():
            storage.doubtful = True


def view_key(tensor: Tensor) -> View:
    """Return the place of a tensor in its storage."""
    x = _dense(tensor)
    try:
        return (x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)
    except (RuntimeError, NotImplementedError):  # a layout without strides
        return (0, tuple(x.shape), None, x.dtype)


def is_freed(tensor: Tensor) -> bool:
    """Return whether the memory of a dense tensor was given back, as ``fully_shard`` does with parameters
    between their uses; to read it would end the process."""
    try:
        return not tensor.untyped_storage().nbytes() and bool(tensor.numel()) and not tensor.is_meta
    except (RuntimeError, NotImplementedError):  # no storage
        return False


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or for a sparse tensor the tensor of its values."""
    layout = tensor.layout
    if layout is torch.strided or not str(layout).startswith("torch.sparse"):
        return tensor
    return tensor._values() if tensor.is_sparse else tensor.values()


def _address(tensor: Tensor) -> int:
    try:
        return int(_dense(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # no storage (mkldnn, opaque tensors): the object itself
        return -id(tensor)
