"""Measure units: for each output of a layer, the norms of its gradient and of its weights (AdaptiveGradClip).

The norm of a tensor with several units is combined from the norms of the units, so each gradient is read
once, as it is without the rule. The weights are read once too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from stablenum.formats import FLOAT32_MAX
from stablenum.rules.clipping import AdaptiveGradClip, Units
from stablenum_torch._devices.ranks import is_sharded, local_part, local_window
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import (
    BLOCK,
    NARROW_BLOCK,
    SUSPICIOUSLY_SMALL,
    dense_values,
    norms_on_host,
    norms_without_wait,
    saturated,
    sums_of_pieces,
)

__all__ = [
    "as_rows",
    "parts_of_units",
    "real_values",
    "unit_axes",
    "unit_factor",
    "units_on_host",
    "units_without_wait",
]

Axes: TypeAlias = "tuple[int, ...] | None"

# Up to this length torch's reduction over rows is accurate enough, and as fast as a dot product.
_LONGEST_ROW = 2**16


def unit_factor(rule: AdaptiveGradClip, factors: Tensor, param: Tensor) -> Tensor:
    """Return (u,) factors of a parameter's units in a shape that broadcasts over this rank's part of it."""
    axes = rule.unit_axes(param.shape, default="first")
    whole = factors.reshape(rule.unit_shape(param.shape, axes))
    if not is_sharded(param):
        return whole
    return whole[tuple(slice(None) if axis in axes else at for axis, at in enumerate(local_window(param)))]


def parts_of_units(
    rule: AdaptiveGradClip, param: Tensor, tensor: Tensor | None, device: torch.device
) -> Tensor:
    """Return (u,) float64 norms of this rank's parts of units, on ``device``: (0,) if it has none.

    Args:
        rule: defines what a unit is.
        param: the parameter.
        tensor: the parameter itself or its gradient; None counts as zero.
        device: the device of the result.
    """
    axes = rule.unit_axes(param.shape, default="first")
    own = local_part(param)
    if not own.numel():
        return torch.zeros(0, dtype=torch.float64, device=device)
    if tensor is None:
        n = math.prod(size for axis, size in enumerate(own.shape) if axis not in axes)
        return torch.zeros(n, dtype=torch.float64, device=device)
    return _unit_norms(tensor, axes, device)


def unit_axes(rule: AdaptiveGradClip, inputs: StepInputs) -> list[Axes]:
    """Return, for each parameter, the axes over which its units extend; None where there is nothing to
    measure."""
    return [
        rule.unit_axes(p.shape, default="first") if use and p.grad is not None and p.numel() else None
        for p, use in zip(inputs.params, inputs.included, strict=True)
    ]


def _whole(axes: Axes, tensor: Tensor) -> bool:
    """Return whether the tensor is a single unit, so that its norm, which the common code measures anyway, is
    the unit's norm."""
    return axes is not None and len(axes) == tensor.ndim


def real_values(tensor: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Return the tensor as dense real values, and a unit's axes in them (with one more for complex
    numbers)."""
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense_values(dense), (*axes, tensor.ndim) if tensor.is_complex() else axes


# --- on the host -----------------------------------------------------------------------------


def units_on_host(rule: AdaptiveGradClip, inputs: StepInputs) -> tuple[np.ndarray, Units]:
    """Return (n,) float32 norms of CPU gradients as :func:`norms_on_host` gives them, and the units' norms.

    Args:
        rule: defines what a unit is.
        inputs: has the parameters; sparse gradients are converted to dense ones.
    """
    params, axes = inputs.params, unit_axes(rule, inputs)
    norms, of_gradients = _norms_and_units([p.grad for p in params], axes)
    _, of_weights = _norms_and_units(
        [None if a is None else p.detach() for p, a in zip(params, axes, strict=True)], axes
    )
    return norms, Units(of_gradients, of_weights)


def _norms_and_units(
    tensors: Sequence[Tensor | None], axes: Sequence[Axes]
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Return (n,) norms of tensors, and (u_i,) norms of the units of each, (0,) where the axes are None."""
    several = [
        t is not None and a is not None and not _whole(a, t) for t, a in zip(tensors, axes, strict=True)
    ]
    norms = norms_on_host([None if split else t for t, split in zip(tensors, several, strict=True)])
    units = []
    for i, (tensor, over) in enumerate(zip(tensors, axes, strict=True)):
        if tensor is None or over is None:
            units.append(np.zeros(0, np.float32))
        elif not several[i]:
            units.append(norms[i : i + 1])
        else:
            found = _row_norms(as_rows(*real_values(tensor, over)))
            units.append(found.astype(np.float32))
            total = math.sqrt(float(np.square(found).sum()))
            norms[i] = min(total, FLOAT32_MAX) if math.isfinite(total) else total
    return norms, tuple(units)


def as_rows(values: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return (u, k), one unit per row; a view wherever the strides allow it."""
    kept = [axis for axis in range(values.ndim) if axis not in axes]
    # Any order within a unit will do. In the order of memory, channels-last weights are a view, too.
    order = [*kept, *sorted(axes, key=values.stride, reverse=True)]
    return values.permute(order).reshape(math.prod(values.shape[axis] for axis in kept), -1)


def _row_norms(rows: Tensor) -> np.ndarray:
    """Return (u,) float64 norms, at most the largest float32; NaN or inf if and only if the row has one."""
    norms = _plain_row_norms(rows).double().numpy()
    doubtful = np.flatnonzero(~((norms >= SUSPICIOUSLY_SMALL) & (norms < math.inf)))
    if len(doubtful):
        norms = norms.copy()
        for part in np.array_split(doubtful, math.ceil(len(doubtful) * rows.shape[1] / _LONGEST_ROW)):
            if len(part):
                norms[part] = _careful_row_norms(rows[torch.from_numpy(part)])
    return np.where(np.isfinite(norms), np.minimum(norms, FLOAT32_MAX), norms)


def _plain_row_norms(rows: Tensor) -> Tensor:
    """Return (u,) norms in float32, or in float64 for float64 rows; wrong where a square overflowed or
    flushed."""
    wide = rows.dtype in (torch.float32, torch.float64)
    length = rows.shape[1]
    if rows.stride(1) > rows.stride(0):  # the elements of a unit are far apart in memory
        return _column_norms(rows.t())
    if length > (_LONGEST_ROW if wide else NARROW_BLOCK) and rows.dtype != torch.float64:
        return torch.stack([sums_of_pieces(row).sqrt() for row in rows])
    if wide:
        return torch.linalg.vector_norm(rows, dim=1)
    chunks = rows.split(max(1, BLOCK // length))  # narrower formats are widened in the cache
    return torch.cat([torch.linalg.vector_norm(chunk.float(), dim=1) for chunk in chunks])


def _column_norms(matrix: Tensor) -> Tensor:
    """Return (u,) float64 norms of the columns of a (k, u) matrix, computed by blocks of rows."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for block in matrix.split(max(1, _LONGEST_ROW // matrix.shape[1])):
        wide = block if block.dtype in (torch.float32, torch.float64) else block.float()
        total += (wide * wide).sum(0)
    return total.sqrt()


def _careful_row_norms(rows: Tensor) -> np.ndarray:
    """Return the norms, computed in float64. A norm that overflows even there is replaced by ``FLOAT32_MAX``
    if all elements are finite."""
    largest = rows.abs().amax(1).double()
    norms = torch.linalg.vector_norm(rows.double(), dim=1)
    norms = torch.where(torch.isfinite(norms), norms, torch.full_like(norms, FLOAT32_MAX))
    return torch.where(torch.isfinite(largest), norms, largest).numpy()


# --- without a wait --------------------------------------------------------------------------


def units_without_wait(rule: AdaptiveGradClip, inputs: StepInputs) -> tuple[Tensor, Units]:
    """Measure as :func:`units_on_host` does, for unsharded gradients on any device."""
    params, device, axes = inputs.params, inputs.device, unit_axes(rule, inputs)
    grads = [p.grad for p in params]
    split = [a is not None and not _whole(a, p) for p, a in zip(params, axes, strict=True)]
    of_gradients = [
        _unit_norms(g, a, device) if g is not None and a is not None and s else None
        for g, a, s in zip(grads, axes, split, strict=True)
    ]
    of_weights = [
        _unit_norms(p, a, device) if a is not None and s else None
        for p, a, s in zip(params, axes, split, strict=True)
    ]
    # A gradient's norm is the norm of its units' norms, so the units' norms are measured in its place.
    norms = norms_without_wait(
        [g if u is None else u for g, u in zip(grads, of_gradients, strict=True)], device
    )
    single = [
        p.detach() if a is not None and not s else None for p, a, s in zip(params, axes, split, strict=True)
    ]
    weights = norms_without_wait(single, device)
    return norms, Units(_as_units(of_gradients, norms, axes), _as_units(of_weights, weights, axes))


def _unit_norms(tensor: Tensor, axes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (u,) float64 norms of a tensor's units."""
    values, over = real_values(local_part(tensor), axes)
    norms = torch.linalg.vector_norm(values, dim=over, dtype=torch.float64)
    if values.dtype == torch.float64:
        # Squares of float64 numbers may overflow even here; the largest magnitude shows if all are finite.
        largest = torch.linalg.vector_norm(values, ord=math.inf, dim=over)
        norms = torch.where(torch.isinf(norms), largest, norms)
    return to_device(norms.reshape(-1), device)


def _as_units(found: Sequence[Tensor | None], norms: Tensor, axes: Sequence[Axes]) -> tuple[Tensor, ...]:
    """Return (u_i,) float32 per tensor: the norms found, the norm of a tensor that is one unit, or
    nothing."""
    several = [u for u in found if u is not None]
    parts = iter(saturated(torch.cat(several)).split([len(u) for u in several]) if several else ())
    return tuple(
        next(parts) if u is not None else norms[i : i + 1] if a is not None else norms[:0]
        for i, (u, a) in enumerate(zip(found, axes, strict=True))
    )
