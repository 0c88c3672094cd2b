"""A sample of the parameters' elements, before and after a step: how far the step moved them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stablenum.runlog.lines import Update
from stablenum.runlog.updates import SAMPLE, update_of
from stablenum_torch._devices.ranks import local_part

__all__ = ["counts_of", "sample", "update_between"]


def sample(params: Iterable[Tensor]) -> Tensor:
    """Return up to 256 elements of each parameter, evenly spaced: one float32 tensor, without a wait.

    It is on the device of the first parameter.

    Raises:
        RuntimeError: a parameter is of a kind that cannot be sampled so, as one in a sparse layout.
    """
    few = [_few(local_part(p).detach()) for p in params]
    return torch.cat([part.to(few[0].device, non_blocking=True) for part in few])


def counts_of(params: Iterable[Tensor]) -> list[int]:
    """Return how many elements of each parameter this process holds."""
    return [local_part(p).numel() for p in params]


def update_between(
    step: int, samples: Sequence[Tensor], counts: Sequence[int], names: Sequence[str]
) -> Update | None:
    """Return how far a step moved the parameters.

    Args:
        step: the step's number.
        samples: the samples before and after the step, on the host.
        counts: the elements of each parameter.
        names: the parameters' names.

    Returns:
        The update; None if the samples are not those of these parameters, or there is no finite size.
    """
    sizes = [min(SAMPLE, count) for count in counts]
    if any(len(each) != sum(sizes) for each in samples):
        return None
    before, after = (torch.split(each, sizes) for each in samples)
    moved = [_root_mean_square(b - a) for a, b in zip(before, after, strict=True)]
    return update_of(step, moved, [_root_mean_square(a) for a in before], counts, names)


def _few(part: Tensor) -> Tensor:
    few = part.reshape(-1)[:: max(1, part.numel() // SAMPLE)][:SAMPLE]
    return (few.abs() if few.is_complex() else few).float()


def _root_mean_square(elements: Tensor) -> float:
    return float(elements.norm()) / math.sqrt(max(1, elements.numel()))
