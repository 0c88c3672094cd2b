"""Join what the ranks measured: one row per rank, and values per parameter where a rule needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import array_api_compat.torch as torch_namespace
import numpy as np
import torch
from torch import Tensor

from stablenum.guard.config import GuardConfig
from stablenum.guard.recorder import recorded_loss
from stablenum.norms.exact_sums import DIGITS, LIMBS, Sums, aligned, carried, counted_once
from stablenum.norms.wide import Wide
from stablenum.rules.clipping import AdaptiveGradClip, Units
from stablenum_torch._devices.joint import Joint
from stablenum_torch._devices.ranks import local_part, local_window
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.elements import Extremes, extremes_without_wait
from stablenum_torch._step.measure.exactly import as_row, exact_norms, exact_sums, sum_of_rows
from stablenum_torch._step.measure.norms import (
    dense_values,
    gradient_norms_without_wait,
    in_float32,
    saturated,
    squares_of,
)
from stablenum_torch._step.measure.units import parts_of_units

__all__ = ["Together", "measured_together", "needs_rows", "widths"]

# Float64 norms above the first number, whose squares overflow, are exchanged in units of the second.
_HUGE, _HUGE_UNIT, _LARGEST = 1e150, 2.0**700, torch.finfo(torch.float64).max
_COLUMNS = 4  # norm, worst parameter, loss, found_inf; then what the loss scale asks for


class Together(NamedTuple):
    """What all ranks measured.

    Attributes:
        rows: (p, k), a row per rank: norm, worst parameter, loss, found_inf.
        norms: (n,) float64, the norms of whole parameters, or of this rank's parts if no rule needs them.
        units: the norms of whole units in float64, if a rule needs them.
        extremes: what the loss-scale rule asks for, per rank.
        total: the joint norm, if it is computed without rounding.
    """

    rows: Tensor
    norms: Tensor
    units: Units | None
    extremes: Extremes
    total: Wide | None = None


def needs_rows(config: GuardConfig) -> bool:
    """Return whether a rule needs values of each parameter."""
    return config.needs_single_norms or config.unit_rule is not None


def widths(config: GuardConfig, params: Sequence[Tensor], included: Sequence[bool]) -> list[int]:
    """Return how many values of each parameter are joined: its norm, and two for each of its units."""
    return [1 + 2 * len_of_units(config.unit_rule, p, use) for p, use in zip(params, included, strict=True)]


def len_of_units(rule: AdaptiveGradClip | None, param: Tensor, included: bool) -> int:
    """Return how many units a whole parameter has."""
    if rule is None or not included or not param.numel():
        return 0
    axes = rule.unit_axes(param.shape, default="first")
    return int(np.prod(rule.unit_shape(param.shape, axes)))


def measured_together(inputs: StepInputs, joint: Joint, *, wide: bool = False) -> Together:
    """Measure this rank's parts of the gradients, and exchange the results with the other ranks.

    Args:
        inputs: what this rank measures, and where the results are put.
        joint: the ranks that decide together, which are ``inputs.joint``.
        wide: whether norms are exchanged in float64, as those beyond float32's range have to be.
    """
    config, params, device = inputs.config, inputs.params, inputs.device
    norms = gradient_norms_without_wait(params, device)
    norms = _beyond_roots(params, norms) if wide else norms
    extremes, shares = extremes_without_wait(inputs), joint.shares(device)
    part = _beyond_squares(norms, shares) if wide else (squares_of(norms) * shares).sum().sqrt()
    rows = needs_rows(config)
    dtype = torch.float64 if wide or rows or config.needs else torch.float32
    columns = [
        part,
        _worst(params, norms),
        *_noted(inputs, part),
        *_of_rank(extremes, shares),
    ]
    columns[0] = part if dtype == torch.float64 else saturated(part)
    row = torch.stack([column.to(dtype) for column in columns])
    sums = None
    if config.exact_norms:
        own = exact_sums([p.grad for p in params], device)
        sums = counted_once(own, joint.first(device), xp=torch_namespace)
        row = torch.cat([row, as_row(sums).to(dtype)])
    if rows:
        table, found = _joined_norms(inputs, joint, norms, row, wide=wide)
        norms = torch.stack([found[start] for start in joint.starts])
    else:
        table, found = joint.exchange(row)
    units = _units(inputs, joint, found)
    extremes = _of_ranks(table[:, _COLUMNS : len(columns)], config.needs)
    if sums is None:
        return Together(table, norms, units, extremes)
    if config.per_tensor:
        norms = _exact_norms(sums, joint)
    return Together(table, norms, units, extremes, sum_of_rows(table[:, len(columns) :]))


def _exact_norms(sums: Sums, joint: Joint) -> Tensor:
    """Return (n,) float64, the norms of whole parameters, each rounded once."""
    top = joint.largest_rows(sums.window).to(torch.int32)
    joined = joint.joined_rows(aligned(sums, top, xp=torch_namespace).flatten(1).T)
    digits = joined.T.reshape(len(top), LIMBS, DIGITS).int()
    found = exact_norms(carried(top, digits, xp=torch_namespace))
    return torch.ldexp(found.value.double(), found.power)


def _beyond_roots(params: Sequence[Tensor], norms: Tensor) -> Tensor:
    """Return the norms of this rank's parts of gradients on the host, of which those whose squares overflow
    float64 are measured again."""
    found = norms.clone()
    for i in _is_huge(norms).nonzero().flatten().tolist():
        part = dense_values(local_part(params[i].grad)).double()
        found[i] = norms[i] * torch.linalg.vector_norm(part / norms[i])
    return torch.where(torch.isfinite(norms), found.clamp(max=_LARGEST), norms)


def _beyond_squares(norms: Tensor, shares: Tensor) -> Tensor:
    """Return the joint norm of finite norms whose squares may overflow float64."""
    unit = norms.amax().clamp(min=torch.finfo(torch.float64).tiny)
    return unit * ((norms / unit).square() * shares).sum().sqrt()


def _worst(params: Sequence[Tensor], norms: Tensor) -> Tensor:
    """Return the index of the first norm that is not finite, otherwise of the largest; -1 without
    gradients."""
    if all(p.grad is None for p in params):
        return torch.full((), -1.0, dtype=torch.float64, device=norms.device)
    return torch.where(torch.isfinite(norms), norms, torch.inf).argmax()


def _noted(inputs: StepInputs, like: Tensor) -> list[Tensor]:
    loss, found_inf = inputs.loss, inputs.found_inf
    own = None if loss is None else to_device(in_float32(loss), like.device)
    found = torch.zeros_like(like) if found_inf is None else to_device(found_inf, like.device)
    return [recorded_loss(own, like.float(), xp=torch_namespace), found]


def _of_rank(extremes: Extremes, shares: Tensor) -> list[Tensor]:
    """Return the extremes of this rank's gradients; those that other ranks have too count in part."""
    largest, filled, above = extremes
    found = [] if largest is None else [largest.amax()]
    return found + [(n.double() * shares).sum() for n in (filled, above) if n is not None]


def _of_ranks(table: Tensor, needs: frozenset[str]) -> Extremes:
    columns = iter(table.unbind(1))
    largest = next(columns) if "amax" in needs else None
    filled, above = (next(columns), next(columns)) if "tiny" in needs else (None, None)
    return Extremes(largest, filled, above)


# --- values per parameter ----------------------------------------------------------------------


def _joined_norms(
    inputs: StepInputs, joint: Joint, norms: Tensor, row: Tensor, *, wide: bool
) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks, and the norms of whole parameters and units in one vector."""

    def joined(squares: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        values, places = _values(inputs, joint, norms, squares)
        return joint.exchange(row, values, places)

    if not wide:
        table, sums = joined(squares_of)
        return table, sums.sqrt()
    table, sums = joined(_squares_of_ordinary)
    _, huge = joined(_squares_of_huge)
    found = torch.hypot(sums.sqrt(), huge.sqrt() * _HUGE_UNIT)
    return table, torch.where(torch.isfinite(sums), found.clamp(max=_LARGEST), found)


def _squares_of_ordinary(norms: Tensor) -> Tensor:
    return torch.where(_is_huge(norms), 0.0, norms).square()


def _squares_of_huge(norms: Tensor) -> Tensor:
    return torch.where(_is_huge(norms), norms / _HUGE_UNIT, 0.0).square()


def _is_huge(norms: Tensor) -> Tensor:
    return torch.isfinite(norms) & (norms > _HUGE)


def _values(
    inputs: StepInputs, joint: Joint, norms: Tensor, squares: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what this rank adds to the joined vector, and where."""
    params, device, rule = inputs.params, inputs.device, inputs.config.unit_rule
    shares = joint.row_shares(device)
    if rule is None:
        return squares(norms) * shares, _places(joint, device, lambda: [np.asarray(joint.starts)])
    used = [len_of_units(rule, p, use) for p, use in zip(params, inputs.included, strict=True)]
    values, each = [squares(norms) * shares], shares.unbind()
    for which in ([p.grad for p in params], [p.detach() for p in params]):
        for i, (p, tensor, n) in enumerate(zip(params, which, used, strict=True)):
            if n:
                values.append(squares(parts_of_units(rule, p, tensor, device)) * each[i])

    def places() -> list[np.ndarray]:
        own = [_own_units(rule, p) if n else np.zeros(0, np.int64) for p, n in zip(params, used, strict=True)]
        firsts = [(start + 1, start + 1 + n) for start, n in zip(joint.starts, used, strict=True)]
        grads, weights = ([at[k] + o for at, o in zip(firsts, own, strict=True)] for k in (0, 1))
        return [np.asarray(joint.starts), *grads, *weights]

    return torch.cat(values), _places(joint, device, places)


def _places(joint: Joint, device: torch.device, make: Callable[[], list[np.ndarray]]) -> Tensor:
    return joint.kept("places", device, lambda: torch.from_numpy(np.concatenate(make()).astype(np.int64)))


def _own_units(rule: AdaptiveGradClip, param: Tensor) -> np.ndarray:
    """Return the indices, among the units of the whole parameter, of those of which this rank has a part."""
    axes, window = rule.unit_axes(param.shape, default="first"), local_window(param)
    shape = rule.unit_shape(param.shape, axes)
    grid = np.arange(int(np.prod(shape))).reshape(shape)
    own = grid[tuple(slice(None) if axis in axes else at for axis, at in enumerate(window))]
    empty = any(at.stop <= at.start for at in window)
    return np.zeros(0, np.int64) if empty else own.reshape(-1)


def _units(inputs: StepInputs, joint: Joint, found: Tensor) -> Units | None:
    rule = inputs.config.unit_rule
    if rule is None:
        return None
    norms, weights = [], []
    for start, p, use in zip(joint.starts, inputs.params, inputs.included, strict=True):
        n = len_of_units(rule, p, use)
        norms.append(found[start + 1 : start + 1 + n])
        weights.append(found[start + 1 + n : start + 1 + 2 * n])
    return Units(tuple(norms), tuple(weights))
