"""Compare the bits of parameters and optimizer state among the ranks that hold copies of them."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from stablenum.errors import ReplicasPartedError
from stablenum.guard.replicas import (
    ABSENT,
    PARAMETER,
    Parted,
    check_due,
    digest,
    parted_error,
    parted_slots,
)
from stablenum_torch._devices.checksums import checksums
from stablenum_torch._devices.groups import Groups
from stablenum_torch._devices.joint import Joint, collective_device
from stablenum_torch._devices.ranks import is_dtensor, mesh_ranks, place_in_mesh, replicas, several_ranks
from stablenum_torch._devices.waits import capturing
from stablenum_torch._step.checks import keeps_state_on_one_rank

__all__ = ["ReplicaCheck"]

_logger = logging.getLogger("stablenum")
_LISTED = 16  # slots whose tensors are looked at, of those that differ

_REMEDY = (
    "Load the last good checkpoint on all ranks, or copy parameters and optimizer state from a good rank, as "
    "in torch.distributed.broadcast(tensor, src={good})."
)


class _Plan(NamedTuple):
    """Where each parameter of this rank is in the vector that the ranks share.

    Attributes:
        joint: the ranks for which this was made.
        slots: for each parameter, its slot; the ranks that hold a copy of it have the same.
        parameters: for each slot, a number of the parameter.
        compared: how many parameters of any one rank have copies; 0 if nothing is compared on any rank.
    """

    joint: Joint
    slots: list[int]
    parameters: list[int]
    compared: int


class ReplicaCheck:
    """The check of one guard: counts its steps, and compares the replicas after every so many of them.

    All ranks have to step equally often, as they have to in order to decide together.

    Args:
        every: after how many steps.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps = 0
        self._told = False
        self._plan: _Plan | None = None

    def after_step(
        self,
        joint: Joint | None,
        groups: Groups,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        names: Callable[[], Sequence[str]],
        step: Callable[[], int],
    ) -> None:
        """Compare the replicas, if this is due. In steps in which it is not, nothing is done.

        Args:
            joint: the ranks that decide together.
            groups: the groups that the user gave.
            optimizer: holds the state.
            params: its parameters.
            names: returns their names.
            step: returns the number of the last step; called only for a message.

        Raises:
            ReplicasPartedError: replicas differ. Nothing is changed.
        """
        self._steps += 1
        if not check_due(self.every, self._steps) or capturing():
            return
        if joint is None:
            self._tell_of_no_replicas()
            return
        if self._plan is None or self._plan.joint is not joint:
            self._plan = _planned(joint, groups, params, names())
        if not self._plan.compared:
            self._tell_of_no_replicas()
            return
        tensors = _identified(optimizer, params)
        differ = _differing(self._plan, [digest(own) for own in tensors], params[0].device)
        if differ:
            raise _error(self._plan, differ, tensors, names(), step())

    def _tell_of_no_replicas(self) -> None:
        if not self._told:
            self._told = True
            unknown = several_ranks() and self._plan is None
            why = _UNKNOWN if unknown else "no two ranks hold copies of a parameter here"
            _logger.warning("check_replicas_every has nothing to compare: %s.", why)


_UNKNOWN = (
    "it is not known which of the ranks hold copies. Pass loss_group= to wrap(); for "
    "DistributedDataParallel, names=model will do"
)


def _error(
    plan: _Plan,
    differ: Sequence[int],
    tensors: Sequence[Mapping[str, str]],
    names: Sequence[str],
    step: int,
) -> ReplicasPartedError:
    """Return the error about these slots, the same on all ranks."""
    parameters = len({plan.parameters[slot] for slot in differ})
    return parted_error(
        _gathered_parts(plan, differ[:_LISTED], tensors, names),
        step=step,
        kind="rank",
        parameters=parameters,
        compared=max(parameters, plan.compared),
        remedy=_REMEDY,
    )


# --- which ranks hold the same ---------------------------------------------------------------------


def _planned(joint: Joint, groups: Groups, params: Sequence[Any], names: Sequence[str]) -> _Plan:
    """Return the plan. All ranks have to call this at the same time: it communicates."""
    places = [_place(groups, p) for p in params]
    shapes = [tuple(p.shape) if is_dtensor(p) else () for p in params]
    said = repr(list(zip(names, shapes, [(mesh, parts) for mesh, _, parts in places], strict=True)))
    own = hashlib.sha256(said.encode()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size(joint.group)
    compared = sum(copies > 1 for copies in joint.copies)
    dist.all_gather_object(everyone, (own, compared), group=joint.group)
    compared = max(count for _, count in everyone)
    if all(other == own for other, _ in everyone):
        parameters = [i for i, (_, _, parts) in enumerate(places) for _ in range(parts)]
        starts = itertools.accumulate((parts for _, _, parts in places), initial=0)
        slots = [start + part for start, (_, part, _) in zip(starts, places, strict=False)]
        return _Plan(joint, slots, parameters, compared)
    # Other parameters on other ranks, as in a pipeline.
    keys = [f"{own} {i} {part}" for i, (_, part, _) in enumerate(places)]
    dist.all_gather_object(everyone, keys, group=joint.group)
    slots_by_key = {key: slot for slot, key in enumerate(dict.fromkeys(itertools.chain(*everyone)))}
    return _Plan(joint, [slots_by_key[key] for key in keys], list(slots_by_key.values()), compared)


def _place(groups: Groups, param: Any) -> tuple[object, int, int]:
    """Return the mesh, if it is not the ranks' only one, and which of how many parts this rank holds."""
    if is_dtensor(param):
        mesh = None if groups.parts is None else mesh_ranks(param)
        return mesh, place_in_mesh(param), param.device_mesh.size() // replicas(param)
    if groups.parts is not None:
        return None, dist.get_rank(groups.parts), dist.get_world_size(groups.parts)
    return None, 0, 1


# --- what each rank holds --------------------------------------------------------------------------


def _identified(optimizer: Optimizer, params: Sequence[Tensor]) -> list[dict[str, str]]:
    """Return, for each parameter, what identifies the bits of its tensors."""
    state = {} if keeps_state_on_one_rank(optimizer) else optimizer.state
    held = [{PARAMETER: p, **dict(_entries(state.get(p, {})))} for p in params]
    tensors = [value for own in held for value in own.values() if isinstance(value, Tensor)]
    sums = iter(checksums(tensors))
    return [{name: _identity(value, sums) for name, value in own.items()} for own in held]


def _entries(value: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    """Return the tensors and numbers in the state of a parameter, each with its name."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entries(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _entries(inner, f"{path}[{i}]")
    elif isinstance(value, (Tensor, int, float, complex)):
        yield path, value


def _identity(value: Any, sums: Iterator[int]) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {tuple(value.shape)} {next(sums)}"


# --- what the ranks share --------------------------------------------------------------------------


def _differing(plan: _Plan, digests: Sequence[int], device: torch.device) -> list[int]:
    """Return the slots in which ranks differ: the same list on all ranks."""
    length = len(plan.parameters)
    largest, inverted = [ABSENT] * length, [ABSENT] * length
    for slot, value in zip(plan.slots, digests, strict=True):
        largest[slot], inverted[slot] = value, ~value
    group = plan.joint.group
    vector = torch.tensor(largest + inverted, dtype=torch.int64).to(collective_device(group, device))
    dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group)
    joined = vector.tolist()
    return parted_slots(joined[:length], joined[length:])


def _gathered_parts(
    plan: _Plan, slots: Sequence[int], tensors: Sequence[Mapping[str, str]], names: Sequence[str]
) -> list[Parted]:
    """Return the tensors in these slots that differ, in the order of the slots."""
    wanted, own = set(slots), zip(plan.slots, names, tensors, strict=True)
    mine = {slot: (name, dict(held)) for slot, name, held in own if slot in wanted}
    everyone: list[Any] = [None] * len(plan.joint.ranks)
    dist.all_gather_object(everyone, mine, group=plan.joint.group)
    by_rank = dict(zip(plan.joint.ranks, everyone, strict=True))
    return [part for slot in slots for part in _parted(slot, by_rank)]


def _parted(slot: int, by_rank: Mapping[int, Mapping[int, tuple[str, Mapping[str, str]]]]) -> list[Parted]:
    holders = {rank: held[slot] for rank, held in by_rank.items() if slot in held}
    name = next(name for name, _ in holders.values())
    each = dict.fromkeys(entry for _, held in holders.values() for entry in held)
    found = [Parted(name, entry, {r: held.get(entry) for r, (_, held) in holders.items()}) for entry in each]
    return [part for part in found if len(set(part.held.values())) > 1]
