"""Gradients in shards: joining the norms of all ranks before anything is decided.

Every rank ends with the same norms, so all ranks decide alike. One collective a mesh carries norm and
finiteness together: the sum of squares of a NaN or an inf is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["is_distributed", "join_norms", "local_part", "several_ranks"]


def several_ranks() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_distributed(grad: Any) -> bool:
    """Whether a gradient is a DTensor, as FSDP2 and tensor parallelism make them."""
    return grad is not None and hasattr(grad, "device_mesh") and hasattr(grad, "placements")


def local_part(grad: Any) -> Tensor:
    """The part of a gradient that lies on this rank; writing to it writes to the gradient."""
    if not is_distributed(grad):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            "gradients must be sharded or replicated DTensors; got a partial one, whose values "
            "are only known after a sum over ranks. Redistribute it first."
        )
    local: Tensor = grad.to_local()
    return local


def join_norms(
    norms: Tensor, grads: Sequence[Tensor | None], process_group: dist.ProcessGroup | None
) -> Tensor:
    """(n,) float64 norms of whole gradients from those of this rank's parts.

    Args:
        norms: (n,) float64, of the local parts.
        grads: the gradients; a DTensor is joined over the mesh dimensions that shard it.
        process_group: ranks over which plain gradients are shards, or None if they are whole.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for i, grad in enumerate(grads):
        for group in _sharding_groups(grad, process_group):
            groups.setdefault(group, []).append(i)
    if not groups:
        return norms
    # Finite norms that float64 could not square belong to float64 gradients; they saturate anyway.
    squares = torch.where(torch.isfinite(norms), norms.clamp(max=1e150), norms).square()
    for group, members in groups.items():
        if len(members) == len(norms):
            dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=group)
            continue
        index = torch.tensor(members, device=norms.device)
        part = squares[index]
        dist.all_reduce(part, op=dist.ReduceOp.SUM, group=group)
        squares = squares.index_copy(0, index, part)
    return squares.sqrt()


def _sharding_groups(grad: Any, process_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    if not is_distributed(grad):
        # A parameter without gradient takes part too: ranks may differ in which they have.
        return [] if process_group is None else [process_group]
    mesh = grad.device_mesh
    return [mesh.get_group(d) for d, p in enumerate(grad.placements) if p.is_shard()]
