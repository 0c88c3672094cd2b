"""Measure every gradient's L2 norm in one read. The norm is finite if and only if the gradient is.

The float32 sum of squares in torch's own norms overflows from 1.8e19 on, flushes below 2.6e-23, and loses
accuracy with size on a CPU (a relative error of 2e-3 at 2**25 elements). Here squares are summed in blocks.
On a CPU the host checks the result, and computes it again in float64 in the rare case that it may be wrong.
On an accelerator everything is in float64, which costs no time, because the reduction is bound by memory
bandwidth.

Functions ``*_on_host`` read values of CPU tensors. Functions ``*_without_wait`` read no values and work on
any device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stablenum.formats import FLOAT32_MAX
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device

__all__ = [
    "BLOCK",
    "NARROW_BLOCK",
    "SUSPICIOUSLY_SMALL",
    "dense_values",
    "gradient_norms_without_wait",
    "in_float32",
    "norms_on_host",
    "norms_without_wait",
    "saturated",
    "squares_of",
    "stacked",
    "sums_of_pieces",
    "wide_norms_without_wait",
]

# Up to this size, one multi-tensor call computes the norms of all tensors; above it, a dot product is faster
# and more accurate.
_SMALL = 2**16
# Elements whose squares are summed in one float32 sum. A larger block is faster and less accurate (relative
# error of the norm at 2**18: 4e-7 for random values, up to 4e-5 for equal ones, at any length from 2**16 on;
# at 3 * 2**17: 9e-7). Squares of 16-bit values have few distinct significands, so their rounding errors do
# not cancel, and their sums have to be shorter.
BLOCK, NARROW_BLOCK = 2**18, 2**13
_NARROW_ROW = 2**10
# Below this joint norm the squares of elements that matter may have flushed to zero.
SUSPICIOUSLY_SMALL = 2.0**-40


def dense_values(grad: Tensor) -> Tensor:
    """Return the real values that a gradient stores: the entries of a sparse one, both parts of a complex
    one."""
    if grad.layout != torch.strided:
        grad = grad.coalesce().values()
    if not grad.dtype.is_complex:
        return grad
    # The conjugation of a lazily conjugated gradient is ignored, because it does not change magnitudes.
    return torch.view_as_real(grad.conj() if grad.is_conj() else grad)


# --- on the host -----------------------------------------------------------------------------


def norms_on_host(grads: Sequence[Tensor | None]) -> np.ndarray:
    """Return (n,) float32 norms of CPU gradients; 0 where a gradient is None or empty.

    A norm is not finite if and only if an element is not: NaN if there is a NaN, else inf. The norm of a
    finite gradient saturates at the largest float32.
    """
    found = _norms_of_small(grads)
    if found is not None:
        return found
    places = [i for i, g in enumerate(grads) if g is not None and g.numel()]
    values = [dense_values(grads[i]) for i in places]
    same = len(values) == len(grads) and all(map(operator.is_, values, grads))
    found = None if same else _norms_of_small(values)
    if found is None:
        found = _norms_of_any(values)
    if len(found) == len(grads):
        return found
    norms = np.zeros(len(grads), np.float32)
    norms[places] = found
    return norms


def _norms_of_small(values: Sequence[Tensor | None]) -> np.ndarray | None:
    """Return (n,) float32 norms if all are small dense tensors and no square overflowed or flushed; else
    None."""
    for v in values:
        if v is None or v.dtype is not torch.float32 or v.layout is not torch.strided:
            return None
        if not 0 < v.numel() <= _SMALL:
            return None
    if not values:
        return None
    norms: np.ndarray = torch.stack(torch._foreach_norm(values, 2)).numpy()
    return norms if SUSPICIOUSLY_SMALL**2 <= norms @ norms < math.inf else None


def _norms_of_any(values: list[Tensor]) -> np.ndarray:
    """Return (n,) float32 norms, measured again in float64 where a square may have overflowed or flushed."""
    norms = np.sqrt(_sums_of_squares(values))
    total = float(norms @ norms)
    doubtful = np.ones(len(norms), np.bool_) if total < SUSPICIOUSLY_SMALL**2 else norms == math.inf
    for i in np.flatnonzero(doubtful).tolist():
        norms[i] = _careful_norm(values[i])
    # Rounding to float32 must not turn a finite norm into inf.
    norms = np.where(np.isfinite(norms), np.minimum(norms, FLOAT32_MAX), norms)
    return norms.astype(np.float32)


def _sums_of_squares(values: list[Tensor]) -> np.ndarray:
    """Return (n,) float64, the square of each tensor's norm; inf where float32 overflowed."""
    sums = np.zeros(len(values))
    small: list[int] = []
    wide: list[int] = []
    narrow: list[int] = []
    large: list[int] = []
    for i, v in enumerate(values):
        if v.dtype == torch.float32:
            (small if v.numel() <= _SMALL else large).append(i)
        elif v.dtype == torch.float64:
            wide.append(i)
        else:
            (small if v.numel() <= NARROW_BLOCK // 2 else narrow).append(i)
    for members, dtype in ((small, torch.float32), (wide, torch.float64)):
        if members:
            norms = torch._foreach_norm([values[i] for i in members], 2, dtype=dtype)
            sums[members] = np.square(torch.stack(norms).double().numpy())
    if narrow:
        sums[narrow] = torch.stack([_square_by_rows(values[i].reshape(-1)) for i in narrow]).numpy()
    if large:
        # From the last to the first, so that the first are still in the cache when the optimizer, which
        # starts with the first, runs.
        dots = [_dots(values[i].reshape(-1)) for i in reversed(large)][::-1]
        parts = torch.stack([part for parts in dots for part in parts]).double().numpy()
        sums[large] = np.add.reduceat(parts, np.cumsum([0] + [len(parts) for parts in dots[:-1]]))
    return sums


def _dots(flat: Tensor) -> list[Tensor]:
    """Return () float32 sums of squares of the pieces of a 1-d float32 tensor."""
    # The pieces are of equal length, because a short one at the end would cost as much as half a long one.
    pieces = round(len(flat) / BLOCK)
    if pieces < 2:
        return [torch.dot(flat, flat)]
    return [torch.dot(piece, piece) for piece in flat.tensor_split(pieces)]


def _square_by_rows(flat: Tensor) -> Tensor:
    """Return () float64, the sum of squares of a 1-d tensor of 16-bit values, in rows short enough for
    float32."""
    whole = len(flat) // _NARROW_ROW * _NARROW_ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _NARROW_ROW), dim=1, dtype=torch.float32)
    square = norms.double().square().sum()
    if whole < len(flat):
        square += torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).double().square()
    return square


def sums_of_pieces(flat: Tensor) -> Tensor:
    """Return () float64, the sum of squares of a long 1-d tensor; inf where float32 overflowed."""
    return torch.stack(_dots(flat)).double().sum() if flat.dtype == torch.float32 else _square_by_rows(flat)


def _careful_norm(value: Tensor) -> float:
    """Return the norm in float64. If even that overflows, the largest magnitude shows whether all elements
    are finite."""
    if not value.numel():  # a sparse gradient without entries
        return 0.0
    largest = float(value.abs().max())
    if not math.isfinite(largest):
        return largest
    norm = float(torch.linalg.vector_norm(value.double()))
    return norm if math.isfinite(norm) else FLOAT32_MAX


# --- without a wait --------------------------------------------------------------------------


def gradient_norms_without_wait(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (n,) float64 norms of this rank's parts of the parameters' gradients, as
    :func:`wide_norms_without_wait` does."""
    return wide_norms_without_wait([p.grad for p in params], device)


def norms_without_wait(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return (n,) float32 norms of tensors on any device, on ``device``, as :func:`norms_on_host` gives
    them. Of a DTensor, this rank's part is measured."""
    return saturated(wide_norms_without_wait(grads, device))


def wide_norms_without_wait(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the norms of :func:`norms_without_wait` in float64, where a finite norm may exceed float32.

    This takes few launches: one multi-tensor norm per dtype, and one to stack the results.
    """
    if not grads:
        return torch.zeros(0, dtype=torch.float64, device=device)
    return _local_norms(grads, device)


def saturated(norms: Tensor) -> Tensor:
    """Convert to float32; a finite number beyond its range becomes the largest float32."""
    return torch.where(torch.isfinite(norms), torch.clamp(norms, max=FLOAT32_MAX), norms).float()


def in_float32(loss: Tensor) -> Tensor:
    """Return the loss in float32. A finite float64 loss beyond float32's range saturates: it is not inf."""
    if loss.dtype == torch.float64:
        loss = torch.where(torch.isfinite(loss), loss.clamp(-FLOAT32_MAX, FLOAT32_MAX), loss)
    return loss.float()


def squares_of(norms: Tensor) -> Tensor:
    """Return the squares of float64 norms, which are not finite only where the norms are not."""
    # Only norms of float64 gradients can be finite and have squares that overflow float64.
    return torch.where(torch.isfinite(norms), norms.clamp(max=1e150), norms).square()


def _local_norms(grads: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return (n,) float64 norms of the parts on this rank."""
    parts = [(i, local_part(g)) for i, g in enumerate(grads) if g is not None]
    values = [(i, dense_values(part)) for i, part in parts if part.numel()]
    norms: list[Tensor | None] = [None] * len(grads)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for i, value in values:
        if value.numel():  # a sparse gradient may have no entries
            groups.setdefault((value.device, value.dtype), []).append((i, value))
    for (place, dtype), members in groups.items():
        found = _norms_of_one_kind([value for _, value in members], dtype)
        if place != device:
            found = to_device(torch.stack(found), device).unbind()
        for (i, _), norm in zip(members, found, strict=True):
            norms[i] = norm
    return stacked(norms, torch.float64, device)


def _norms_of_one_kind(tensors: list[Tensor], dtype: torch.dtype) -> Sequence[Tensor]:
    """Return () float64 norms of tensors on one device, all of ``dtype``."""
    found = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    if dtype != torch.float64:
        return found
    # Squares of float64 numbers may overflow even here; the largest magnitude shows whether all are finite.
    norms, largest = torch.stack(found), torch.stack(torch._foreach_norm(tensors, math.inf))
    return torch.where(torch.isinf(norms), largest, norms).unbind()


def stacked(values: Sequence[Tensor | None], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stack () values to (n,), with 0 for None; this takes one more launch only if a value is None."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        zero = torch.zeros((), dtype=dtype, device=device)
        present = [zero if value is None else value for value in values]
    return torch.stack(present)
