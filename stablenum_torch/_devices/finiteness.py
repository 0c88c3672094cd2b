"""Which of several tensors are finite, and how large they are, in about one pass over their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

__all__ = ["magnitudes", "which_are_finite"]

# What the kernels take. Everything else, such as 8-bit formats, is measured in float32.
_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Tensors of at most so many elements are measured in one copy, which takes less time than a call for each.
# Chosen: 64 KiB in float32, so that the copy of all of a model's is a small part of its memory.
_SMALL = 1 << 14


@torch.no_grad()
def which_are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return which tensors are finite, without a wait: (n,) bool on their device.

    The largest magnitude, and so the largest and the smallest value, are NaN if an element is, and cannot
    overflow.

    Args:
        tensors: at least one; real, strided and not empty, all of one device and format.
    """
    if tensors[0].dtype not in _MEASURED:
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    if not tensors[0].is_cpu:
        return torch.stack(torch._foreach_norm(tensors, math.inf)).isfinite()  # a few kernels for all
    # On a CPU that norm takes twelve times as long as both extremes.
    smallest, largest = zip(*map(torch.aminmax, tensors), strict=True)
    return torch.stack(smallest).isfinite() & torch.stack(largest).isfinite()


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """Return the largest magnitude in each tensor; NaN or inf if it is not finite. The host waits once.

    Args:
        tensors: as for :func:`which_are_finite`.
    """
    if tensors[0].dtype not in _MEASURED:
        tensors = [tensor.to(torch.float32) for tensor in tensors]
    if not tensors[0].is_cpu:
        return torch.stack(torch._foreach_norm(tensors, math.inf)).tolist()
    sizes = [tensor.numel() for tensor in tensors]
    small = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= _SMALL]
    if len(small) == len(tensors):
        return _together(small, sizes)
    together = iter(_together(small, [size for size in sizes if size <= _SMALL]) if small else ())
    return [
        next(together) if size <= _SMALL else max(abs(x.item()) for x in torch.aminmax(tensor))
        for tensor, size in zip(tensors, sizes, strict=True)
    ]


def _together(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[float]:
    """Return the largest magnitude in each tensor, all of which are copied. NumPy propagates NaN, too."""
    values = _flatten_dense_tensors(tensors).detach()
    array = np.abs((values if values.dtype is torch.float64 else values.float()).numpy())
    return np.maximum.reduceat(array, [0, *itertools.accumulate(sizes[:-1])]).tolist()
