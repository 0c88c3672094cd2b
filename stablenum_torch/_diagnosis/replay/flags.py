"""Flags and statistics of a tensor; reading them makes the host wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stablenum.diagnosis.replay.outliers import MOST_ENTRIES, Outliers, outliers_in
from stablenum.diagnosis.replay.values import MOST_VALUES, TensorStats
from stablenum_torch._diagnosis.replay.tensor_memory import is_freed

__all__ = ["CLEAN", "Flags", "bad_positions", "flags_of", "outliers_of", "stats_of"]

Flags = tuple[bool, bool, bool]
CLEAN: Flags = (False, False, False)


def flags_of(tensor: Tensor) -> Flags:
    """Return whether any element is NaN, whether any is inf, and whether any is -inf.

    If none is, a single reduction is usually enough.
    """
    x = _plain(tensor)
    if x is None:
        return CLEAN
    # The cheapest reduction first. A finite sum has finite terms; a non-finite sum may have overflowed.
    total = x.sum(dtype=torch.float32 if x.element_size() < 4 else None)
    if math.isfinite(float(total)):
        return CLEAN
    low, high = torch.aminmax(x.contiguous())
    smallest, largest = (float(low), float(high)) if x.is_cpu else torch.stack((low, high)).tolist()
    if math.isnan(smallest) or math.isnan(largest):
        return True, bool(torch.isposinf(x).any()), bool(torch.isneginf(x).any())
    return False, largest == math.inf, smallest == -math.inf


def stats_of(tensor: Tensor, *, name: str = "", at: Tensor | None = None) -> TensorStats:
    """Return counts and extremes.

    Args:
        tensor: any tensor.
        name: the tensor's name, shown with the statistics.
        at: (n, ndim) positions of elements whose values are kept, at most four of them.
    """
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    x = _plain(tensor)
    if x is None:
        readable = not (tensor.is_meta or tensor._is_zerotensor() or is_freed(tensor))
        readable = readable and tensor.layout is torch.strided
        if tensor.numel() and readable:
            x = tensor.double()  # torch has no minimum for some integer dtypes
            low, high = float(x.min()), float(x.max())
            amax = max(abs(low), abs(high))
            return TensorStats(
                dtype=dtype,
                shape=shape,
                size=tensor.numel(),
                name=name,
                min=low,
                max=high,
                amax=amax,
                zero=int((x == 0).sum()),
                values=_values(tensor, at),
            )
        return TensorStats(dtype=dtype, shape=shape, size=tensor.numel(), name=name)
    finite = torch.isfinite(x)
    kept = x[finite].double()
    some = kept.numel() > 0
    tiny = torch.finfo(x.dtype).tiny
    magnitude = kept.abs()
    return TensorStats(
        dtype=dtype,
        shape=shape,
        size=tensor.numel(),
        min=float(kept.min()) if some else math.nan,
        max=float(kept.max()) if some else math.nan,
        amax=float(magnitude.max()) if some else math.nan,
        nan=int(torch.isnan(x).sum()),
        posinf=int(torch.isposinf(x).sum()),
        neginf=int(torch.isneginf(x).sum()),
        zero=int((kept == 0).sum()),
        subnormal=int(((magnitude > 0) & (magnitude < tiny)).sum()),
        values=_values(tensor, at),
        name=name,
    )


def outliers_of(tensor: Tensor) -> Outliers | None:
    """Return the entries that are far from the rest; None for none."""
    x = _plain(tensor) if tensor.layout is torch.strided and tensor.numel() <= MOST_ENTRIES else None
    if x is None:
        return None
    x = x.detach().abs() if x.element_size() >= 4 else x.detach().float().abs()
    return outliers_in(x.nan_to_num(0.0, 0.0, 0.0), torch.median)


def bad_positions(tensor: Tensor) -> Tensor | None:
    """Return (n, ndim) positions of the first few elements that are not finite."""
    if tensor.layout is not torch.strided or not tensor.is_floating_point() or not tensor.numel():
        return None
    bad = ~torch.isfinite(tensor if tensor.element_size() > 1 else tensor.float())
    return bad.nonzero()[:MOST_VALUES]


def _values(tensor: Tensor, at: Tensor | None) -> tuple[float, ...]:
    if at is None or tensor.layout is not torch.strided or tensor.is_complex():
        return ()
    return tuple(float(v) for v in tensor[tuple(at.T)].reshape(-1)[:MOST_VALUES])


def _plain(tensor: Tensor) -> Tensor | None:
    """Return the real numbers in a tensor; None if none of them can be non-finite."""
    # The zeros of forward-mode derivatives have no memory, and reading them below autograd ends the process.
    if tensor.is_meta or tensor._is_zerotensor():
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if is_freed(tensor):
        return None
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if not tensor.numel():
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.element_size() == 1 else tensor
