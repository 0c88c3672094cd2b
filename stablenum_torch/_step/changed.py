"""Gradients and parameters that other code may have changed between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.measure.norms import dense_values

__all__ = ["Versions", "few_of", "have_moved", "largest_elements", "versions", "writes_to"]

# The gradients of all parameters: which tensor, and how often it was written to.
Versions = list[tuple[int, int] | None]

_FEW = 8  # parameters that are looked at in every backward pass: reading a version takes 30 ns

_PIECE = 2**22  # elements compared at a time, so that a large gradient takes little memory


def versions(params: Iterable[Tensor]) -> Versions:
    """Return what differs after a gradient was written to or replaced. No values are read."""
    grads = (p.grad for p in params)
    return [None if g is None or g.is_inference() else (id(g), g._version) for g in grads]


def largest_elements(params: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return (2,) float64 on ``device``: the largest size of an element, and how many elements have it.

    Without a wait. Of sharded gradients, only this rank's elements are looked at.
    """
    grads = [dense_values(local_part(p.grad)) for p in params if p.grad is not None]
    pieces = [piece for g in grads if g.numel() for piece in g.detach().flatten().split(_PIECE)]
    if not pieces:
        return torch.zeros(2, dtype=torch.float64, device=device)
    ends = [to_device(torch.stack(torch.aminmax(piece)).double(), device) for piece in pieces]
    largest = torch.stack(ends).abs().amax()
    reached = torch.zeros_like(largest)
    for piece in pieces:
        bound = to_device(largest, piece.device).to(piece.dtype)
        reached += to_device(((piece == bound) | (piece == -bound)).sum(), device)
    return torch.stack([largest, reached])


def few_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return a few of the parameters that are trained, evenly spaced."""
    trained = [p for p in params if p.requires_grad and not p.is_inference()]
    return trained[:: max(1, len(trained) // _FEW)][:_FEW]


def writes_to(few: Sequence[Tensor]) -> list[int]:
    """Return how often each of a few parameters was written to. No values are read."""
    return [p._version for p in few]


def have_moved(before: Sequence[int], now: Sequence[int]) -> bool:
    """Return whether most parameters were written to, as in a step: a single one may be by a forward pass, as
    of ``Embedding(max_norm=1.0)``."""
    return 2 * sum(map(int.__ne__, before, now)) > len(now)
