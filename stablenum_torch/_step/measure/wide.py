"""Measure norms that float32 cannot hold, or that are near the ends of its range, on the host.

The common measurement saturates. A step whose decision may depend on what was cut off is measured once more
here, in float64 and with a power of two for each norm; no ordinary step comes this far.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stablenum.norms.wide import STEP, Wide, narrow
from stablenum.rules.clipping import AdaptiveGradClip, Units
from stablenum_torch._devices.scalar_namespace import scalars
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import dense_values
from stablenum_torch._step.measure.units import as_rows, real_values, unit_axes, units_on_host

__all__ = ["wide_norms_on_host", "wide_units_on_host"]


def wide_norms_on_host(params: Sequence[Tensor]) -> Wide:
    """Return (n,) norms of finite CPU gradients as ``Observation`` has them: norms and exponents."""
    found = [
        _norms_of_rows(dense_values(p.grad).reshape(1, -1)) if p.grad is not None else _NOTHING
        for p in params
    ]
    return _joined(found)


def wide_units_on_host(rule: AdaptiveGradClip, inputs: StepInputs) -> tuple[Wide, Units]:
    """Return the norms of :func:`wide_norms_on_host`, and the units' norms with their exponents."""
    _, units = units_on_host(rule, inputs)
    wide = []
    for param, axes in zip(inputs.params, unit_axes(rule, inputs), strict=True):
        if param.grad is None or axes is None:
            wide.append(_joined([]))
        else:
            wide.append(_joined([_norms_of_rows(as_rows(*real_values(param.grad, axes)))]))
    values, exponents = tuple(one.value for one in wide), tuple(one.power for one in wide)
    return wide_norms_on_host(inputs.params), Units(values, units.weights, exponents)


_NOTHING = np.zeros(1), np.zeros(1, np.int32)


def _joined(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> Wide:
    """Return float64 norms and their powers in one vector, as float32 and powers."""
    norms = np.concatenate([np.zeros(0), *(norms for norms, _ in found)])
    powers = np.concatenate([np.zeros(0, np.int32), *(powers for _, powers in found)])
    return narrow(norms, powers, xp=scalars)


def _norms_of_rows(rows: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 norms of the rows, and the powers of two to multiply them by."""
    if not rows.shape[1]:  # an empty tensor, or a sparse gradient without entries
        return np.zeros(len(rows)), np.zeros(len(rows), np.int32)
    wide = rows.double()
    huge = (wide.abs().amax(1) > 2.0**500).numpy()  # squares may overflow float64
    shrunk = wide * torch.from_numpy(np.where(huge, 2.0**-600, 1.0))[:, None]
    norms = torch.linalg.vector_norm(shrunk, dim=1).numpy()
    return np.where(huge, norms * 2.0 ** (600 - STEP), norms), np.where(huge, STEP, 0).astype(np.int32)
