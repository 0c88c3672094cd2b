"""The ranks that decide together: who they are, what each of them holds, and the one collective they share.

Each rank puts what it measured into a row of its own, and one all-reduce gives every rank the rows of all.
Because only one rank writes to each place, no sum is rounded, and every rank computes the same decision from
the same numbers (``stablenum/guard/ranks.py``). Rules that need the norm of every parameter (``AdaGC``) or of
every unit (``AdaptiveGradClip``) add places for these, where the parts of one parameter are added up.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stablenum_torch._devices.groups import Groups
from stablenum_torch._devices.ranks import check_group, initialized, is_dtensor, mesh_ranks, replicas
from stablenum_torch._devices.state import to_device

__all__ = ["Joint", "check_groups", "collective_device", "joint_of"]


class Joint:
    """The ranks that decide together on the parameters of one optimizer.

    Args:
        group: these ranks.
        copies: for each parameter, how many of the ranks hold the same part of it.
        rows: where the values of each parameter begin in the vector in which they are joined, and the length
            of that vector.
        sharers: for each parameter, how many ranks add the same value to its place in that vector.
        first: for each parameter, whether this is the first of the ranks that hold this part of it.
        names: the names of the parameters on each rank, by its position in the group; None if they are the
            same on all ranks.
        apart: whether ranks have other parameters than others, as the stages of a pipeline do.

    Attributes:
        ranks: the numbers of the ranks, by position.
        position: this rank's position.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        copies: Sequence[int],
        rows: tuple[Sequence[int], int],
        sharers: Sequence[int],
        first: Sequence[bool],
        names: Sequence[Sequence[str]] | None,
        apart: bool = False,
    ) -> None:
        self.group, self._names, self.apart = group, names, apart
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.position = self.ranks.index(dist.get_rank())
        self.copies, (self.starts, self.length), self.sharers = copies, rows, sharers
        self._first = first
        self._tensors: dict[tuple[str, torch.device], Tensor] = {}
        self._device: torch.device | None = None

    def shares(self, device: torch.device) -> Tensor:
        """Return (n,) float64: 1 / copies."""
        return self.kept("shares", device, lambda: _inverse(self.copies))

    def row_shares(self, device: torch.device) -> Tensor:
        """Return (n,) float64: 1 / sharers."""
        return self.kept("row shares", device, lambda: _inverse(self.sharers))

    def first(self, device: torch.device) -> Tensor:
        """Return (n,) bool: whether this is the first of the ranks that hold this part of a parameter."""
        return self.kept("first", device, lambda: torch.tensor(list(self._first)))

    def names_by(self, own: Sequence[str]) -> Callable[[int | None], tuple[int | None, Sequence[str]]]:
        """Return what gives the number of the rank at a position, and the names of its parameters."""

        def of(position: int | None) -> tuple[int | None, Sequence[str]]:
            if position is None or position >= len(self.ranks):  # a row of before, or of another set of ranks
                return position, own
            return self.ranks[position], own if self._names is None else self._names[position]

        return of

    def exchange(
        self, row: Tensor, values: Tensor | None = None, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows of all ranks, (p, k), and the joined vector, (length,) or (0,).

        Args:
            row: (k,), what this rank measured.
            values: (m,) what this rank adds to the vector; None if no rule needs it on any rank.
            places: (m,) int64, where.
        """
        k, size = len(row), len(self.ranks)
        length = 0 if values is None else self.length
        vector = torch.zeros(size * k + length, dtype=row.dtype, device=row.device)
        vector[self.position * k : (self.position + 1) * k] = row
        if values is not None:
            vector[size * k :].index_add_(0, places, values.to(row.dtype))
        vector = self._all_reduced(vector)
        return vector[: size * k].view(size, k), vector[size * k :]

    def largest_rows(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks of a value for each parameter: (n,)."""
        index = self._index(values.device)
        table = torch.zeros(self.length, dtype=torch.float32, device=values.device)
        table[index] = values.float()
        return self._all_reduced(table, dist.ReduceOp.MAX)[index]

    def joined_rows(self, columns: Tensor) -> Tensor:
        """Return the sums over ranks of values per parameter: (k, n) float64.

        Args:
            columns: (k, n) values, divided by the number of their sharers.
        """
        index = self._index(columns.device)
        table = torch.zeros(len(columns), self.length, dtype=torch.float64, device=columns.device)
        table[:, index] = columns.double()
        return self._all_reduced(table)[:, index]

    def _index(self, device: torch.device) -> Tensor:
        return self.kept("starts", device, lambda: torch.tensor(list(self.starts)))

    def _all_reduced(self, values: Tensor, operation: Any = None) -> Tensor:
        if self._device is None:
            self._device = collective_device(self.group, values.device)
        there = values.to(self._device)
        dist.all_reduce(there, dist.ReduceOp.SUM if operation is None else operation, group=self.group)
        return there.to(values.device)

    def kept(self, key: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that is the same in every step, made in the first."""
        found = self._tensors.get((key, device))
        if found is None:
            found = self._tensors[key, device] = to_device(make(), device)
        return found


def _inverse(counts: Sequence[int]) -> Tensor:
    return torch.tensor([1.0 / count for count in counts], dtype=torch.float64)


def check_groups(groups: Groups, params: Sequence[Tensor]) -> None:
    """Check that the groups and the meshes of the parameters fit together. Nothing is communicated.

    Raises:
        TypeError: a group is not one.
        ValueError: this process is outside a group, a mesh has ranks outside the group, or no group holds
            all ranks.
    """
    check_group("process_group", groups.parts)
    check_group("loss_group", groups.loss)
    together = _ranks_together(groups, params)
    if together is None:
        return
    name = "loss_group" if groups.loss is not None else "process_group"
    for param in params:
        if not is_dtensor(param):
            continue
        outside = sorted(set(mesh_ranks(param)) - set(together))
        if groups == (None, None) and mesh_ranks(param) != together:
            raise ValueError(
                f"a parameter is on a mesh of the ranks {list(mesh_ranks(param))}, and another one on a mesh "
                f"of {list(together)}. If ranks outside the first mesh hold other parameters (experts, "
                "stages of a pipeline), pass process_group=, a group of all ranks; if they hold copies, pass "
                "that group as loss_group=."
            )
        if outside:
            raise ValueError(
                f"{name} must contain all ranks of the mesh of every parameter; a parameter is on the ranks "
                f"{list(mesh_ranks(param))}, of which {outside} are missing in {list(together)}."
            )
        if groups.parts is None:
            _check_multiple("the mesh of every parameter", mesh_ranks(param), together)
    if groups.parts is not None:
        _check_multiple("process_group", dist.get_process_group_ranks(groups.parts), together)


def _check_multiple(name: str, parts: Sequence[int], together: Sequence[int]) -> None:
    if set(parts) - set(together) or len(together) % len(parts):
        raise ValueError(
            f"loss_group must contain all ranks of {name}, and a whole number of copies of it; got the ranks "
            f"{list(together)} for {list(parts)}."
        )


def _ranks_together(groups: Groups, params: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the ranks that decide together; None if this process decides alone."""
    group = groups.loss if groups.loss is not None else groups.parts
    if group is not None:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    if not initialized():
        return None
    meshes = {mesh_ranks(p) for p in params if is_dtensor(p)}
    return max(meshes, key=len) if meshes else None


def joint_of(
    groups: Groups,
    params: Sequence[Tensor],
    config: Mapping[str, Any],
    names: Sequence[str],
    widths: Sequence[int],
) -> Joint | None:
    """Return the ranks that decide together, after all of them have compared their settings.

    Rules that need the norm of each parameter take plain parameters of the same place as parts of one, if all
    of them on all ranks are one-dimensional, as the shards of ZeRO and FSDP1 are; otherwise each rank's plain
    parameters are its own, as the stages of a pipeline are. DTensors know their parts.

    This communicates, so every rank has to call it at the same time: in its first step, and in the first one
    after its parameters or settings have changed.

    Args:
        groups: the groups that the user gave.
        params: the parameters of the optimizer.
        config: the settings, as plain values.
        names: the parameters' names.
        widths: how many values of each parameter are joined, if a rule needs any.

    Raises:
        ValueError: ranks have different settings, or groups do not fit the meshes.
    """
    check_groups(groups, params)
    together = _ranks_together(groups, params)
    if together is None:
        return None
    group = _group_of(groups, params, together)
    flat = all(p.ndim <= 1 for p in params if not is_dtensor(p))
    own = [
        (name, tuple(p.shape) if is_dtensor(p) else (), w)
        for name, p, w in zip(names, params, widths, strict=True)
    ]
    seen = _gathered((dict(config), flat, _digest(own, params)), group)
    _check_settings([settings for settings, *_ in seen], dist.get_process_group_ranks(group))
    # Shards of plain parameters are one-dimensional; otherwise each rank's parameters are its own.
    apart = groups.parts is not None and not all(one[1] for one in seen)
    alike = not apart and all(one[2] == seen[0][2] for one in seen)
    at = f"{dist.get_rank(groups.parts)} " if apart else ""
    keys = [
        f"{_digest(own)} {i} {_digest(mesh_ranks(p)) if is_dtensor(p) else at}" for i, p in enumerate(params)
    ]
    starts, length, holders = _layout(
        [(keys, widths)] * len(seen) if alike else _gathered((keys, list(widths)), group)
    )
    everyone, parts = len(together), [_parts(groups, p) for p in params]
    copies = [_replicas(p) * everyone // n for p, n in zip(params, parts, strict=True)]
    # A mesh has its own places, so of a DTensor only the mesh's replicas add the same value.
    sharers = [
        _replicas(p) if is_dtensor(p) else everyone // n if groups.parts is not None else holders[key]
        for p, n, key in zip(params, parts, keys, strict=True)
    ]
    others = None if alike else _gathered(list(names), group)
    first = [_is_first(groups, p, together) for p in params]
    rows, stages = ([starts[key] for key in keys], length), groups.parts is not None and not alike
    return Joint(group, copies, rows, sharers, first, others, stages)


def _is_first(groups: Groups, param: Any, together: Sequence[int]) -> bool:
    """Return whether this is the first of the ranks that hold this part of a parameter."""
    if groups.parts is not None:
        held_by: Sequence[int] = dist.get_process_group_ranks(groups.parts)
    else:
        held_by = mesh_ranks(param) if is_dtensor(param) else [dist.get_rank()]
    if together[0] not in held_by:
        return False
    return not is_dtensor(param) or all(
        at == 0
        for at, placement in zip(param.device_mesh.get_coordinate(), param.placements, strict=True)
        if placement.is_replicate()
    )


def _digest(value: Any, params: Sequence[Any] = ()) -> str:
    """Return a short text that is the same on all ranks with the same values, and with the same meshes."""
    meshes = [mesh_ranks(p) if is_dtensor(p) else () for p in params]
    return hashlib.sha256(repr((value, meshes)).encode()).hexdigest()[:16]


def _parts(groups: Groups, param: Any) -> int:
    """Return over how many ranks different parts of a parameter, or different parameters, are spread."""
    if groups.parts is not None:
        return dist.get_world_size(groups.parts)
    return len(mesh_ranks(param)) if is_dtensor(param) else 1


def _replicas(param: Any) -> int:
    return replicas(param) if is_dtensor(param) else 1


def _layout(
    lists: Sequence[tuple[Sequence[str], Sequence[int]]],
) -> tuple[dict[str, int], int, dict[str, int]]:
    """Return where the values of each key begin, how many there are, and how many ranks have the key."""
    starts: dict[str, int] = {}
    holders: dict[str, int] = {}
    length = 0
    for keys, widths in lists:
        for key, width in zip(keys, widths, strict=True):
            if key not in starts:
                starts[key], length = length, length + width
            holders[key] = holders.get(key, 0) + 1
    return starts, length, holders


def _check_settings(settings: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    for rank, other in zip(ranks, settings, strict=True):
        for field in sorted({*settings[0], *other}):
            if settings[0].get(field) != other.get(field):
                raise ValueError(
                    f"all ranks must have the same settings; {field} is {settings[0].get(field)!r} on rank "
                    f"{ranks[0]} and {other.get(field)!r} on rank {rank}. Nothing was changed."
                )


def _gathered(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return what each rank of the group gives, in the order of the ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def _group_of(groups: Groups, params: Sequence[Any], together: tuple[int, ...]) -> dist.ProcessGroup:
    given = groups.loss if groups.loss is not None else groups.parts
    if given is not None:
        return given
    for param in params:
        if is_dtensor(param) and param.device_mesh.ndim == 1 and mesh_ranks(param) == together:
            group: dist.ProcessGroup = param.device_mesh.get_group()
            return group
    if len(together) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return _new_group(together, dist.group.WORLD)


@functools.lru_cache(maxsize=64)
def _new_group(ranks: tuple[int, ...], _world: object) -> dist.ProcessGroup:
    # The world is a part of the key, and not its id, which a later world may have.
    made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return made


def collective_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device on which the group can reduce values of ``device``."""
    backends = dict(part.split(":") for part in str(dist.get_backend_config(group)).split(",") if ":" in part)
    if not backends or device.type in backends or "cuda" not in backends:
        return device
    return torch.device("cuda", torch.cuda.current_device())  # CPU offload under NCCL alone
