"""The ranks that go back together, and what they tell one another."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from stablenum_torch._devices.groups import Groups, groups_of
from stablenum_torch._devices.ranks import check_group, initialized, is_dtensor, mesh_ranks, several_ranks
from stablenum_torch._recovery.optimizers import parameters_of
from stablenum_torch._step.optimizer import GuardedOptimizer

__all__ = ["Together", "together"]

_logger = logging.getLogger("stablenum")


class Together:
    """The ranks that go back together; one process alone by default.

    Args:
        ranks: their numbers; None for a process alone.
    """

    def __init__(self, ranks: tuple[int, ...] | None = None) -> None:
        self._group: Any = None
        self.position, self.size = 0, 1
        if ranks is not None and len(ranks) > 1:
            # Symptoms are exchanged on the host, where no collective of the training can be in their way.
            self._group = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
            self.position, self.size = dist.get_rank(self._group), len(ranks)

    def gathered(self, value: Any) -> list[Any]:
        """Return what each rank has, in the order of the ranks; called by all."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


def together(model: nn.Module, opt: GuardedOptimizer, process_group: dist.ProcessGroup | None) -> Together:
    """Return the ranks that go back together.

    Args:
        model: the model.
        opt: its guarded optimizer.
        process_group: these ranks, if they were given.

    Raises:
        TypeError: ``process_group`` is not a group.
        ValueError: this process is not in it; or it was not given, and it is not known who belongs together.
    """
    check_group("process_group", process_group)
    if not several_ranks():
        return Together()
    if process_group is not None:
        return Together(tuple(dist.get_process_group_ranks(process_group)))
    known = sorted(_known_ranks(model, opt), key=len)
    if not known:
        _logger.warning(
            "Several ranks train here, and it is not known which of them belong together, so each goes back "
            "by itself. Give process_group=torch.distributed.group.WORLD to Recovery if they train one model."
        )
        return Together()
    if any(not set(ranks) <= set(known[-1]) for ranks in known):
        raise ValueError(
            "process_group must be given where ranks are grouped in several ways, none of which has all of "
            f"them; got None, and groups {', '.join(str(list(ranks)) for ranks in known)}. Give the group of "
            "all ranks that train this model."
        )
    return Together(known[-1])


def _known_ranks(model: nn.Module, opt: GuardedOptimizer) -> set[tuple[int, ...]]:
    """Return the ranks of each group and mesh that the model and the optimizer are known to have."""
    found = {mesh_ranks(p) for p in parameters_of(opt) if is_dtensor(p)}
    for group in _groups([opt._guard.groups, groups_of(model)]):
        found.add(tuple(sorted(dist.get_process_group_ranks(group))))
    return found


def _groups(all_groups: Iterable[Groups]) -> list[dist.ProcessGroup]:
    if not initialized():
        return []
    return [group for groups in all_groups for group in groups if group is not None]
