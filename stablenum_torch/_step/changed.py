"""Gradients that other code may have changed between the backward pass and the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from stablenum_torch._devices.ranks import local_part
from stablenum_torch._devices.state import to_device
from stablenum_torch._step.measure import dense_values

__all__ = ["Versions", "largest_elements", "versions"]

# The gradients of all parameters: which tensor, and how often it was written to.
Versions = list[tuple[int, int] | None]

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
