"""Clip the update: what ``ClipUpdateRMS`` does to the parameters that the inner optimizer has moved.

The optimizer moves parameters in place; the update is the difference from a copy taken before the step. A
parameter whose factor is 1 stays as the optimizer left it, bit for bit; so does one that a fused kernel did
not move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from stablenum.formats import FLOAT32_MAX
from stablenum.rules.clipping import ClipUpdateRMS
from stablenum_torch._devices.joint import Joint
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.scalar_namespace import scalars
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import (
    dense_values,
    norms_on_host,
    squares_of,
    wide_norms_without_wait,
)

__all__ = ["Before", "before_update", "clip_update_on_host", "clip_update_without_wait"]

# Elements whose updates are in memory at the same time.
_AT_A_TIME = 2**24


class Before(NamedTuple):
    """The values to keep before a step, so that its update can be clipped afterwards.

    Attributes:
        params: the parameters that the step may move: those with a gradient, in the order of the groups.
        values: copies of this rank's part of their values; complex numbers as two real ones.
        rates: for each group, the positions of its parameters in ``params``, and its learning rate, or 1 if
            the rule does not need it.
        found: empty until the factors are known; then one entry, the versions of the values at that time and
            the factors. An update that was interrupted is thus completed, not shortened a second time.
    """

    params: list[Tensor]
    values: list[Tensor]
    rates: list[tuple[list[int], float | Tensor]]
    found: list[tuple[list[int], list[Any]]]


def before_update(rule: ClipUpdateRMS, optimizer: Optimizer) -> Before:
    """Copy what ``optimizer``, the inner one, is about to move."""
    params: list[Tensor] = []
    rates: list[tuple[list[int], float | Tensor]] = []
    for group in optimizer.param_groups:
        moved = [p for p in group["params"] if p.grad is not None]
        if moved:
            places = list(range(len(params), len(params) + len(moved)))
            rates.append((places, group["lr"] if rule.per_lr else 1.0))
        params += moved
    values = _values(params)
    copies = [torch.empty_like(v) for v in values]
    if copies:
        torch._foreach_copy_(copies, values)
    return Before(params, copies, rates, [])


def clip_update_on_host(rule: ClipUpdateRMS, before: Before) -> None:
    """Move CPU parameters back along their update where its RMS is too large.

    An interrupted call is completed by a second one.
    """
    after = _values(before.params)
    for i, factor in _left(before, after, lambda: _factors_on_host(rule, before, after)):
        if factor[0] != 1:
            after[i].copy_(_shortened(after[i], before.values[i], [float(f) for f in factor]))


def _factors_on_host(rule: ClipUpdateRMS, before: Before, after: Sequence[Tensor]) -> list[Any]:
    """Return the two factors of each update."""
    parts = [_wide_norms_on_host(updates) for updates in _updates(after, before.values)]
    norms = np.concatenate(parts) if parts else np.zeros(0)
    found: list[Any] = []
    for members, rate in before.rates:
        roots = np.sqrt([max(after[i].numel(), 1) for i in members])
        found += zip(*rule.update_factors(norms[members] / roots, float(rate), xp=scalars), strict=True)
    return found


def _wide_norms_on_host(updates: Sequence[Tensor]) -> np.ndarray:
    """Return (n,) float64 norms, measured in float32 where that holds them."""
    norms = norms_on_host(updates)
    found = norms.astype(np.float64)
    for i in np.flatnonzero(norms == FLOAT32_MAX):
        found[i] = float(_scaled_norm(updates[int(i)]))
    return found


def _wide_norms_without_wait(updates: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (n,) float64 norms."""
    norms = wide_norms_without_wait(updates, device).unbind()
    wide = [u.dtype is torch.float64 and u.numel() > 0 for u in updates]
    scaled = [
        _scaled_norm(u).to(device) if is_wide else norm
        for u, norm, is_wide in zip(updates, norms, wide, strict=True)
    ]
    return torch.stack(scaled)


def _scaled_norm(update: Tensor) -> Tensor:
    """Return the norm in float64, at most its largest number if the update is finite."""
    largest = update.abs().amax().double()
    unit = torch.where(largest > 0, largest, 1.0)
    norm = largest * torch.linalg.vector_norm(update.double() / unit)
    return torch.where(torch.isfinite(largest), norm.clamp(max=torch.finfo(torch.float64).max), largest)


def clip_update_without_wait(rule: ClipUpdateRMS, before: Before, inputs: StepInputs) -> None:
    """Do what :func:`clip_update_on_host` does, on any device; for a shard, the RMS of the whole parameter
    counts."""
    after = _values(before.params)
    for i, factor in _left(before, after, lambda: _factors_without_wait(rule, before, after, inputs)):
        factors = [to_device(f, after[i].device) for f in factor]
        moved = _shortened(after[i], before.values[i], factors).to(after[i].dtype)
        after[i].copy_(torch.where(factors[0] == 1, after[i], moved))


def _factors_without_wait(
    rule: ClipUpdateRMS, before: Before, after: Sequence[Tensor], inputs: StepInputs
) -> list[Any]:
    device, joint = inputs.device, inputs.joint
    parts = [_wide_norms_without_wait(updates, device) for updates in _updates(after, before.values)]
    if not parts:
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
    norms: Sequence[Tensor] = torch.cat(parts).unbind()
    roots: Sequence[float | Tensor] = [math.sqrt(max(v.numel(), 1)) for v in after]
    if joint is not None:
        norms, roots = _of_all_ranks(torch.cat(parts), before.params, inputs.params, after, joint)
    found: list[Any] = []
    for members, rate in before.rates:
        rms = torch.stack([norms[i] / roots[i] for i in members])
        lr = to_device(rate.float(), device) if isinstance(rate, Tensor) else rate
        factors = rule.update_factors(rms, lr, xp=torch_namespace)
        found += zip(*(f.unbind() for f in factors), strict=True)
    return found


def _left(before: Before, after: Sequence[Tensor], factors: Callable[[], list[Any]]) -> list[tuple[int, Any]]:
    """Return the positions and factors of the parameters that an interrupted call has not written yet."""
    if torch.compiler.is_compiling():  # a graph runs as a whole
        return list(enumerate(factors()))
    if not before.found:
        before.found.append(([v._version for v in after], factors()))
    versions, known = before.found[0]
    return [(i, f) for i, f in enumerate(known) if after[i]._version == versions[i]]


def _values(params: Sequence[Tensor]) -> list[Tensor]:
    return [dense_values(local_part(p.detach())) for p in params]


def _updates(after: Sequence[Tensor], before: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the updates of a few parameters at a time, because all of them together would take too much
    memory."""
    first, size = 0, 0
    for i, values in enumerate(after):
        size += values.numel()
        if size >= _AT_A_TIME or i + 1 == len(after):
            chosen = slice(first, i + 1)
            yield list(
                torch._foreach_sub([_wide(v) for v in after[chosen]], [_wide(v) for v in before[chosen]])
            )
            first, size = i + 1, 0


def _shortened(after: Tensor, before: Tensor, factors: Sequence[float | Tensor]) -> Tensor:
    """Return ``before + (after - before) * factors[0] * factors[1]``, computed in float32 or wider."""
    start = _wide(before)
    update = _wide(after) - start
    for factor in factors:
        update = update.mul_(factor)
    return update.add_(start)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _of_all_ranks(
    norms: Tensor, moved: Sequence[Tensor], params: Sequence[Tensor], after: Sequence[Tensor], joint: Joint
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the norms of whole updates, and the square roots of the numbers of their real elements."""
    moves = {id(p): i for i, p in enumerate(moved)}
    finite = squares_of(norms)
    squares, none = finite.unbind(), torch.zeros((), dtype=torch.float64, device=norms.device)
    # Made on the device, because numbers copied from the host would make it wait.
    sizes = [torch.full_like(none, v.numel()) for v in after]
    at = [moves.get(id(p)) for p in params]
    rows = [torch.stack([none if i is None else of[i] for i in at]) for of in (squares, sizes)]
    joined, whole = joint.joined_rows(torch.stack(rows) * joint.row_shares(norms.device))
    own = [k for k, i in enumerate(at) if i is not None]  # in the order of `moved`
    roots, counts = joined.sqrt().unbind(), whole.clamp(min=1.0).sqrt().float().unbind()
    return [roots[k] for k in own], [counts[k] for k in own]
