"""What a rank knows by itself: whether there are others, and which part of a parameter it holds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = [
    "check_group",
    "initialized",
    "is_dtensor",
    "is_first_rank",
    "is_sharded",
    "local_part",
    "local_window",
    "mesh_ranks",
    "place_in_mesh",
    "replicas",
    "several_ranks",
]


def initialized() -> bool:
    """Return whether this process belongs to a group of ranks, be it the only one."""
    return dist.is_available() and dist.is_initialized()


def several_ranks() -> bool:
    """Return whether this process is one of several that train together."""
    return initialized() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Return whether this process trains alone or is rank 0."""
    return not initialized() or dist.get_rank() == 0


def check_group(name: str, group: object) -> None:
    """Check the argument ``process_group`` or ``loss_group``.

    Raises:
        TypeError: it is neither a group nor None.
        ValueError: this process does not belong to it.
    """
    if dist.is_available() and isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"{name} must contain this process; new_group() returned a group without rank {dist.get_rank()}. "
            "Give each rank the group that it belongs to."
        )
    allowed = (dist.ProcessGroup, type(None)) if dist.is_available() else type(None)
    if not isinstance(group, allowed):
        raise TypeError(
            f"{name} must be a torch.distributed.ProcessGroup, as torch.distributed.new_group() "
            f"returns, or None; got {type(group).__name__}."
        )
    if group is not None and dist.get_rank(group) < 0:
        raise ValueError(
            f"{name} must contain this process; rank {dist.get_rank()} is not among its ranks "
            f"{dist.get_process_group_ranks(group)}. Give each rank the group that it belongs to."
        )


def is_dtensor(tensor: Any) -> bool:
    """Return whether this is a DTensor, without importing that class."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_part(grad: Any) -> Tensor:
    """Return this rank's part of a gradient; writing to it writes to the gradient.

    Raises:
        ValueError: the gradient is a partial DTensor.
    """
    if not is_dtensor(grad):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"gradients must be sharded or replicated DTensors; got placements {grad.placements}, "
            "whose values are only known after a sum over ranks. Before the step, set "
            "p.grad = p.grad.redistribute(placements=p.placements)."
        )
    local: Tensor = grad.to_local()
    return local


def mesh_ranks(param: Any) -> tuple[int, ...]:
    """Return the ranks of a DTensor's mesh."""
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))


def replicas(param: Any) -> int:
    """Return how many ranks of a DTensor's mesh hold the same part of it."""
    # is_shard() is not used, because it is False for the strided shards of FSDP over tensor parallelism.
    count = 1
    for d, placement in enumerate(param.placements):
        count *= param.device_mesh.size(d) if placement.is_replicate() else 1
    return count


def place_in_mesh(param: Any) -> int:
    """Return which part of a DTensor this rank holds: a number from 0, the same on all its replicas."""
    mesh, place = param.device_mesh, 0
    for d, (placement, at) in enumerate(zip(param.placements, mesh.get_coordinate(), strict=True)):
        if not placement.is_replicate():
            place = place * mesh.size(d) + at
    return place


def is_sharded(param: Any) -> bool:
    """Return whether the parameter is a DTensor of which several ranks hold different parts."""
    return is_dtensor(param) and replicas(param) < param.device_mesh.size()


def local_window(param: Any) -> tuple[slice, ...]:
    """Return where this rank's part of a parameter lies in the whole."""
    if not is_dtensor(param):
        return tuple(slice(0, n) for n in param.shape)
    # Private to torch, but its checkpoints are built on it; no public function knows strided shards.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))
