"""Which value a tensor holds at this time.

The same memory is seen through many tensor objects: views, detached copies, what autograd saved and
unpacked. A value belongs to a place in a storage (offset, shape, strides) and to the count of writes to that
storage. Weak references keep a freed storage's address from being taken for another's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Memory", "Storage", "view_key"]

View = tuple[Any, ...]


@dataclass(slots=True)
class Storage:
    """What is known of one storage.

    Attributes:
        reference: keeps the address unique.
        outside: it was there before the replay.
        epoch: how many operations have written to it.
        views: the value that was last seen at a place, and the epoch then.
        writes: (epoch, value) of each write.
        unwritten: the value of memory that came without content.
    """

    reference: Any
    outside: bool = False
    epoch: int = 0
    views: dict[View, tuple[int, int]] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)
    unwritten: int | None = None

    def current(self, view: View) -> int | None:
        """The value at a place, None if it was written since or was never looked at."""
        seen = self.views.get(view)
        return seen[0] if seen is not None and seen[1] == self.epoch else None

    def sources(self, view: View) -> list[int]:
        """The values that what lies at a place now is made of: what was there, and what was written since."""
        seen = self.views.get(view)
        if seen is None:
            found = [value for value, _ in self.views.values()] + [value for _, value in self.writes]
        else:
            found = [seen[0]] + [value for epoch, value in self.writes if epoch > seen[1]]
        return sorted(set(found))


class Memory:
    """All storages that a replay has met."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}

    def find(self, tensor: Tensor) -> Storage | None:
        """The storage, if it was met before."""
        return self._storages.get(_address(tensor))

    def add(self, tensor: Tensor, *, outside: bool) -> Storage:
        """A storage that is met for the first time."""
        address = _address(tensor)
        reference = tensor if address < 0 else StorageWeakRef(_dense(tensor).untyped_storage())
        found = self._storages[address] = Storage(reference=reference, outside=outside)
        return found


def view_key(tensor: Tensor) -> View:
    """A place in a storage."""
    x = _dense(tensor)
    try:
        return (x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)
    except (RuntimeError, NotImplementedError):  # a layout without strides
        return (0, tuple(x.shape), None, x.dtype)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor whose memory stands for that of a sparse one."""
    if tensor.is_sparse:
        return tensor._values()
    return tensor.values() if str(tensor.layout).startswith("torch.sparse") else tensor


def _address(tensor: Tensor) -> int:
    try:
        return int(_dense(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # no storage (mkldnn, opaque tensors): the object itself
        return -id(tensor)
