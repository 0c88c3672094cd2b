"""Measure norms without rounding (``exact_norms=True``), so that they do not depend on who holds what.

Each square is an integer, and integers are added up exactly in any order (``stablenum/norms/exact_sums.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import array_api_compat.torch as torch_namespace
import torch
from torch import Tensor

from stablenum.formats import FLOAT32_MAX
from stablenum.norms.exact_sums import (
    DIGITS,
    LIMBS,
    WINDOWS,
    Sums,
    add,
    as_columns,
    from_columns,
    norms,
    window,
)
from stablenum.norms.wide import Wide
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.measure.norms import dense_values

__all__ = [
    "as_row",
    "exact_norms",
    "exact_sums",
    "sum_of_rows",
    "total_of",
]

_AT_A_TIME = 2**16  # elements whose squares stay in the cache
_ROWS = 2**7  # what `add` can add up at once


def exact_sums(grads: Sequence[Tensor | None], device: torch.device) -> Sums:
    """Return the sums of squares of this rank's parts of gradients, (n, ...), on ``device``."""
    each = [_sum_of(grad, device) for grad in grads]
    return Sums(torch.stack([one.window for one in each]), torch.stack([one.digits for one in each]))


def _sum_of(grad: Tensor | None, device: torch.device) -> Sums:
    """Return the sum that ``exact_sums.summed`` of the core defines, with operations that are fast in torch.

    float64 holds the square of a float32 number exactly, and each limb is the integer part of what is left.
    """
    if grad is None:
        return _nothing(device)
    flat = dense_values(local_part(grad.detach())).reshape(-1)
    if not flat.numel():
        return _nothing(device)
    pieces = flat.split(_AT_A_TIME)
    largest = torch.stack([_float32(piece).abs().amax() for piece in pieces]).amax()
    top = window(largest.view(torch.int32), xp=torch_namespace)
    finite = top < WINDOWS
    unit = _units(flat.device).index_select(0, torch.where(finite, top, 0).reshape(1))
    limbs = torch.stack([_limbs(_float32(piece).double().square() * unit) for piece in pieces]).sum(0)
    whole = torch.where(finite, limbs, 0.0).long()
    digits = torch.stack([whole & 0xFFFF, (whole >> 16) & 0xFFFF, whole >> 32], -1).int()
    return Sums(to_device(top, device), to_device(digits, device))


def _limbs(squares: Tensor) -> Tensor:
    """Return the sums of the limbs of squares, the highest first: (LIMBS,) float64, whole numbers.

    Args:
        squares: (k,) float64, in units of the highest limb, so that they are below 2**16.
    """
    found = []
    for _ in range(LIMBS):
        limb = squares.floor()
        found.append(limb.sum())
        squares = (squares - limb) * 2.0**16
    return torch.stack(found)


@functools.lru_cache(maxsize=16)
def _units(device: torch.device) -> Tensor:
    """Return what brings squares to the units of the highest limb, for each window: float64 powers of two."""
    return torch.tensor([2.0 ** (298 - 16 * w) for w in range(WINDOWS)], dtype=torch.float64).to(device)


def _nothing(device: torch.device) -> Sums:
    window = torch.zeros((), dtype=torch.int32, device=device)
    return Sums(window, torch.zeros(LIMBS, DIGITS, dtype=torch.int32, device=device))


def _float32(values: Tensor) -> Tensor:
    """Return elements in float32. A finite float64 element beyond its range saturates."""
    if values.dtype == torch.float64:
        values = torch.where(torch.isfinite(values), values.clamp(-FLOAT32_MAX, FLOAT32_MAX), values)
    return values.float()


def total_of(sums: Sums) -> Sums:
    """Return the sum over the first axis, however long it is."""
    while len(sums.window) > 1:
        parts = [
            add(Sums(window, digits), xp=torch_namespace)
            for window, digits in zip(sums.window.split(_ROWS), sums.digits.split(_ROWS), strict=True)
        ]
        sums = Sums(torch.stack([p.window for p in parts]), torch.stack([p.digits for p in parts]))
    return Sums(sums.window[0], sums.digits[0])


def exact_norms(sums: Sums) -> Wide:
    """Return the norms of the sums, with exponents."""
    return norms(sums, xp=torch_namespace)


def as_row(sums: Sums) -> Tensor:
    """Return this rank's sum as numbers that float32 holds."""
    return as_columns(total_of(sums), xp=torch_namespace)


def sum_of_rows(rows: Tensor) -> Wide:
    """Return the joint norm from the rows of all ranks, (p, COLUMNS)."""
    return exact_norms(total_of(from_columns(rows, xp=torch_namespace)))
