"""Measure elements: the largest gradient element, and the fraction that float16 would lose.

Some loss-scale rules need them (``GuardConfig.needs``). Both measurements are for all gradients together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stablenum.formats import FLOAT32_MAX, SMALLEST_FLOAT16
from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.inputs import StepInputs
from stablenum_torch._step.measure.norms import dense_values, saturated, stacked

__all__ = ["Extremes", "extremes_on_host", "extremes_without_wait"]

# Elements per block: they and two arrays of the same length stay in the cache.
_BLOCK = 2**16


def extremes_on_host(
    grads: Sequence[Tensor | None], needs: frozenset[str]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return ``Observation.amax`` and ``Observation.tiny`` of CPU gradients; None for what ``needs`` does not
    name.

    Both are () float32. They have no meaning if an element is not finite: the step is skipped then.
    """
    if not needs:
        return None, None
    values = [dense_values(g) for g in grads if g is not None and g.numel()]
    values = [v for v in values if v.numel()]  # a sparse gradient without entries
    if "tiny" not in needs:
        return (_largest(values) if "amax" in needs else None), None
    nonzero, above = 0, 0
    magnitudes, mask = np.empty(_BLOCK, np.float32), np.empty(_BLOCK, np.bool_)
    for block in (block for v in values for block in v.reshape(-1).split(_BLOCK)):
        n = len(block)
        # float64 stays float64: otherwise elements that float32 flushes would not be counted.
        wide = block if block.dtype == torch.float64 else block.float()
        size = np.abs(wide.numpy(), out=None if wide.dtype == torch.float64 else magnitudes[:n])
        nonzero += int(np.count_nonzero(np.greater(size, 0, out=mask[:n])))
        above += int(np.count_nonzero(np.greater(size, SMALLEST_FLOAT16, out=mask[:n])))
    tiny = np.asarray(np.float32(nonzero - above) / np.float32(max(nonzero, 1)))
    return (_largest(values) if "amax" in needs else None), tiny


def _largest(values: Sequence[Tensor]) -> np.ndarray:
    """Return () float32, the largest magnitude; finite float64 elements saturate."""
    ends = [end.double() for v in values for end in torch.aminmax(v)]
    largest = float(torch.stack(ends).abs().max()) if ends else 0.0
    return np.asarray(min(largest, FLOAT32_MAX) if math.isfinite(largest) else largest, np.float32)


class Extremes(NamedTuple):
    """Measurements of each gradient, or of all gradients on each rank; None for those that are not needed.

    Attributes:
        largest: (n,) float64, the largest magnitude.
        filled: (n,) int64 or float64, the number of elements that are not 0.
        above: (n,), the number of elements that float16 does not flush.
    """

    largest: Tensor | None
    filled: Tensor | None
    above: Tensor | None

    def joined(self) -> tuple[Tensor | None, Tensor | None]:
        """Return ``Observation.amax`` and ``Observation.tiny`` for all gradients together."""
        amax = None if self.largest is None else saturated(self.largest.amax())
        if self.filled is None or self.above is None:
            return amax, None
        filled = self.filled.sum()
        return amax, (filled - self.above.sum()).float() / filled.clamp(min=1).float()


def extremes_without_wait(inputs: StepInputs) -> Extremes:
    """Measure as :func:`extremes_on_host` does, for gradients on any device.

    Of a DTensor, this rank's part is measured.
    """
    device, needs = inputs.device, inputs.config.needs
    parts = [None if p.grad is None else dense_values(local_part(p.grad)) for p in inputs.params]
    present = [(i, v) for i, v in enumerate(parts) if v is not None and v.numel()]
    tensors = [v for _, v in present]

    def all_of(found: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the measurement of each gradient, (n,), 0 where there is no gradient."""
        each: list[Tensor | None] = [None] * len(parts)
        for (i, _), value in zip(present, found, strict=True):
            each[i] = to_device(value.to(dtype), device)
        return stacked(each, dtype, device)

    largest = filled = above = None
    if "amax" in needs:
        found = torch._foreach_norm(tensors, math.inf, dtype=torch.float64) if tensors else []
        largest = all_of(found, torch.float64)
    if "tiny" in needs:
        filled = all_of([(v != 0).sum() for v in tensors], torch.int64)
        above = all_of([(v.abs() > SMALLEST_FLOAT16).sum() for v in tensors], torch.int64)
    return Extremes(largest, filled, above)
