"""Collectives as a recorder sees them: what each one reads and writes, and the name by which users know it.

Every layout comes down to these operations: DistributedDataParallel, ``fully_shard`` and pipelines call
those of ``c10d``, and DTensors those of ``_c10d_functional``. They return before they have ended, so what
they write is looked at when the program next reads it, after it has waited for them. Nothing waits here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stablenum_torch._devices.ranks import several_ranks
from stablenum_torch._diagnosis.replay.schemas import tensors_in

__all__ = ["Collective", "as_rank", "collective_of", "faked", "local_of", "own_rank", "wait_of", "wrapped"]


class _Kind(Enum):
    IN_PLACE = auto()  # reads and writes its first argument
    FROM_ROOT = auto()  # reads its first argument on one rank, and writes it on the others
    INTO = auto()  # writes its first argument, and reads the second
    SEND = auto()
    RECEIVE = auto()
    RESULT = auto()  # reads its arguments and returns a new tensor


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
        name: the name by which users know it.
        kind: which tensors it reads and writes.
    """

    name: str
    kind: _Kind

    @property
    def adds(self) -> bool:
        """Whether it adds up values of several ranks."""
        return self.name in ("all_reduce", "dist.reduce", "reduce_scatter")

    def reads(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the tensors that it takes from this rank."""
        if self.kind is _Kind.RECEIVE or (self.kind is _Kind.FROM_ROOT and not _is_root(args)):
            return []
        if self.kind is _Kind.INTO:
            return list(tensors_in(args[1]))
        if self.kind is _Kind.RESULT:
            return list(tensors_in((args, {k: v for k, v in kwargs.items() if k != "out"})))
        return list(tensors_in(args[0]))

    def writes(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        """Return the tensors that it gives to this rank."""
        if self.kind is _Kind.SEND:
            return []
        if self.kind is _Kind.RESULT:
            return list(tensors_in(result))
        return list(tensors_in(args[0]))


_C10D = {
    "allreduce_": Collective("all_reduce", _Kind.IN_PLACE),
    "allreduce_coalesced_": Collective("all_reduce", _Kind.IN_PLACE),
    "reduce_": Collective("dist.reduce", _Kind.IN_PLACE),
    "broadcast_": Collective("broadcast", _Kind.FROM_ROOT),
    "allgather_": Collective("all_gather", _Kind.INTO),
    "_allgather_base_": Collective("all_gather", _Kind.INTO),
    "allgather_coalesced_": Collective("all_gather", _Kind.INTO),
    "allgather_into_tensor_coalesced_": Collective("all_gather", _Kind.INTO),
    "reduce_scatter_": Collective("reduce_scatter", _Kind.INTO),
    "_reduce_scatter_base_": Collective("reduce_scatter", _Kind.INTO),
    "reduce_scatter_tensor_coalesced_": Collective("reduce_scatter", _Kind.INTO),
    "gather_": Collective("dist.gather", _Kind.INTO),
    "scatter_": Collective("dist.scatter", _Kind.INTO),
    "alltoall_": Collective("all_to_all", _Kind.INTO),
    "alltoall_base_": Collective("all_to_all", _Kind.INTO),
    "send": Collective("send", _Kind.SEND),
    "recv_": Collective("recv", _Kind.RECEIVE),
    "recv_any_source_": Collective("recv", _Kind.RECEIVE),
}
# The beginnings of the names of functional collectives.
_FUNCTIONAL = {
    "all_reduce": Collective("all_reduce", _Kind.RESULT),
    "all_gather": Collective("all_gather", _Kind.RESULT),
    "reduce_scatter": Collective("reduce_scatter", _Kind.RESULT),
    "all_to_all": Collective("all_to_all", _Kind.RESULT),
    "shard_dim_alltoall": Collective("all_to_all", _Kind.RESULT),
    "broadcast": Collective("broadcast", _Kind.RESULT),
    "isend": Collective("send", _Kind.SEND),
    "irecv": Collective("recv", _Kind.RESULT),
}


@functools.cache
def collective_of(func: Callable[..., Any]) -> Collective | None:
    """Return the collective that an operation is; None for any other operation."""
    schema = getattr(func, "_schema", None)
    return None if schema is None else _find(*str(schema.name).split("::"))


def _find(space: str, name: str) -> Collective | None:
    if space == "c10d":
        return _C10D.get(name)
    if space in ("_c10d_functional", "_dtensor"):
        return next((found for begin, found in _FUNCTIONAL.items() if name.startswith(begin)), None)
    return None


@functools.cache
def wait_of(func: Callable[..., Any]) -> bool:
    """Return whether an operation only waits for a functional collective, or passes its result on."""
    name = str(getattr(getattr(func, "_schema", None), "name", ""))
    return name.startswith("_c10d_functional::") and name.endswith(("wait_tensor", "_wrap_tensor_autograd"))


def _is_root(args: Sequence[Any]) -> bool:
    group = dist.ProcessGroup.unbox(args[1])
    return bool(group.rank() == args[2])


# --- what lies below -------------------------------------------------------------------------------

_PLAIN = (Tensor, torch.nn.Parameter)


def wrapped(types: Sequence[type]) -> bool:
    """Return whether an operation is one on DTensors, or on results of collectives that were not waited for:
    these come down to operations on this rank's own tensors, which follow."""
    return any(t.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types for t in kind.__mro__)


def faked() -> bool:
    """Return whether operations run on shapes alone, as DTensor does to learn the shape of a result."""
    # No public function tells; torch's own modes ask in this way.
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor as it is. Nothing is communicated."""
    if type(tensor) in _PLAIN:
        return tensor
    if hasattr(tensor, "device_mesh") and hasattr(tensor, "placements"):
        with torch.no_grad():
            tensor = tensor.to_local()
    if hasattr(tensor, "trigger_wait"):  # the result of a functional collective
        waited: Tensor = tensor.trigger_wait()
        return waited
    return tensor


def own_rank() -> int | None:
    """Return this process's rank; None if it trains alone."""
    if not several_ranks():
        return None
    return dist.get_rank()


def as_rank(rank: int | None) -> str:
    """Return a rank as reports name it; "" for none."""
    return "" if rank is None else f"rank {rank}"
