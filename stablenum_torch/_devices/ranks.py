"""Sharded gradients: the norms of all ranks are joined before anything is decided.

Every rank ends up with the same norms, so all ranks decide alike. One collective per mesh carries both the
norms and their finiteness, because a sum of squares is NaN or inf if one of its terms is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "check_process_group",
    "is_sharded",
    "join_norms",
    "join_over_ranks",
    "joins_ranks",
    "local_part",
    "several_ranks",
]


def several_ranks() -> bool:
    """Return whether this process is one of several that train together."""
    return _initialized() and dist.get_world_size() > 1


def joins_ranks(params: Sequence[Tensor], process_group: dist.ProcessGroup | None) -> bool:
    """Return whether norms have to be joined over ranks: they do for plain shards and for DTensors."""
    return process_group is not None or (_initialized() and any(map(_is_dtensor, params)))


def check_process_group(process_group: object) -> None:
    """Check the argument ``process_group``.

    Raises:
        TypeError: ``process_group`` is neither a group nor None.
    """
    allowed = (dist.ProcessGroup, type(None)) if dist.is_available() else type(None)
    if not isinstance(process_group, allowed):
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, as torch.distributed.new_group() "
            f"returns, or None; got {type(process_group).__name__}."
        )


def local_part(grad: Any) -> Tensor:
    """Return this rank's part of a gradient; writing to it writes to the gradient.

    Raises:
        ValueError: the gradient is a partial DTensor.
    """
    if not _is_dtensor(grad):
        return grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"gradients must be sharded or replicated DTensors; got placements {grad.placements}, "
            "whose values are only known after a sum over ranks. Before the step, set "
            "p.grad = p.grad.redistribute(placements=p.placements)."
        )
    local: Tensor = grad.to_local()
    return local


def join_norms(norms: Tensor, params: Sequence[Any], process_group: dist.ProcessGroup | None) -> Tensor:
    """Return the norms of whole gradients, (n,) float64, computed from the norms of this rank's parts.

    Args:
        norms: (n,) float64, the norms of the local parts; 0 where this rank has no gradient, because the rank
            takes part in the collective anyway.
        params: the parameters; a DTensor's norm is joined over the mesh dimensions that shard it.
        process_group: the ranks over which plain parameters are sharded, or None if they are whole.
    """
    # Only float64 gradients can have finite norms whose squares overflow float64; such norms saturate anyway.
    squares = torch.where(torch.isfinite(norms), norms.clamp(max=1e150), norms).square()
    return join_over_ranks(squares, params, process_group).sqrt()


def join_over_ranks(
    values: Tensor,
    params: Sequence[Any],
    process_group: dist.ProcessGroup | None,
    *,
    maximum: bool = False,
) -> Tensor:
    """Return the sum over ranks of each parameter's values, or their maximum; shape (n,).

    Args:
        values: (n,), the values of this rank's parts; changed in place.
        params, process_group: as in :func:`join_norms`.
        maximum: return the maximum instead of the sum.
    """
    operation = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for i, param in enumerate(params):
        for group in _sharding_groups(param, process_group):
            groups.setdefault(group, []).append(i)
    for group, members in groups.items():
        if len(members) == len(values):
            dist.all_reduce(values, op=operation, group=group)
            continue
        # Unbound and stacked rather than indexed, because an index made here would have to be copied to the
        # device.
        each = list(values.unbind())
        part = torch.stack([each[i] for i in members])
        dist.all_reduce(part, op=operation, group=group)
        for i, joined in zip(members, part.unbind(), strict=True):
            each[i] = joined
        values = torch.stack(each)
    return values


def is_sharded(param: Any) -> bool:
    """Return whether the parameter is a DTensor of which several ranks hold different parts."""
    return _is_dtensor(param) and any(
        not placement.is_replicate() and param.device_mesh.size(d) > 1
        for d, placement in enumerate(param.placements)
    )


def _sharding_groups(param: Any, process_group: dist.ProcessGroup | None) -> list[dist.ProcessGroup]:
    if not _is_dtensor(param):
        return [] if process_group is None else [process_group]
    # is_shard() is not used, because it is False for the strided shards of FSDP over tensor parallelism.
    sharded = [d for d, placement in enumerate(param.placements) if not placement.is_replicate()]
    return [param.device_mesh.get_group(d) for d in sharded]


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
