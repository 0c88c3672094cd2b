"""The groups of ranks that the user gave, or that a model knows; and what stands for them in a copy."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import torch.distributed as dist

from stablenum_torch._devices.ranks import initialized

__all__ = ["Groups", "check_not_copies", "data_parallel", "groups_of", "restored_group", "saved_group"]

_WORLD = "all ranks"


class Groups(NamedTuple):
    """The groups that the user gave.

    Attributes:
        parts: the ranks that hold different parts of the gradients which are plain tensors, or different
            parameters.
        loss: the ranks that decide together. Outside ``parts`` and the meshes of DTensors they hold copies.
    """

    parts: dist.ProcessGroup | None = None
    loss: dist.ProcessGroup | None = None


def data_parallel(names: object) -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` module that this is, compiled or not; None for anything else."""
    # torch.compile(model) has no public way to the model inside.
    inside = getattr(names, "_orig_mod", names) if isinstance(names, torch.nn.Module) else names
    return inside if isinstance(inside, torch.nn.parallel.DistributedDataParallel) else None


def groups_of(model: object) -> Groups:
    """Return the groups of a ``DistributedDataParallel`` or ``FullyShardedDataParallel`` model; none for
    anything else."""
    copied = data_parallel(model)
    if copied is not None:
        return Groups(loss=copied.process_group)
    # Not imported here: whoever has such a model has imported it.
    module = sys.modules.get("torch.distributed.fsdp")
    inside = getattr(model, "_orig_mod", model) if isinstance(model, torch.nn.Module) else None
    if module is None or not isinstance(inside, module.FullyShardedDataParallel):
        return Groups()
    strategy, group = inside.sharding_strategy.name, inside.process_group
    if strategy == "NO_SHARD":
        return Groups(loss=group)
    return Groups(group, dist.group.WORLD if strategy.startswith("HYBRID") else None)


def check_not_copies(parts: object, copies: dist.ProcessGroup | None) -> None:
    """Check that ranks said to hold different gradients are not those of a model that makes them equal.

    Raises:
        ValueError: they are. The joint norm would be too large.
    """
    if copies is None or not isinstance(parts, dist.ProcessGroup):
        return
    both = sorted({*dist.get_process_group_ranks(parts)} & {*dist.get_process_group_ranks(copies)})
    if len(both) > 1:
        raise ValueError(
            f"process_group must be ranks that hold different gradients; the ranks {both} have equal ones, "
            "those of the DistributedDataParallel model given as names=. Leave process_group out."
        )


def saved_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | str | None:
    """Return what a copy or a pickle has in place of a group: a word for that of all ranks, which another
    process has too. torch can neither copy nor pickle groups."""
    return _WORLD if group is not None and group is dist.group.WORLD else group


def restored_group(saved: dist.ProcessGroup | str | None) -> dist.ProcessGroup | None:
    """Return the group that :func:`saved_group` stands for; None for all ranks in a process alone."""
    if isinstance(saved, str):
        return dist.group.WORLD if initialized() else None
    return saved
