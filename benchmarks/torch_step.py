"""PyTorch: parameters with gradients and a fused AdamW, for the rules' cost."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Variant"]


class Variant:
    """One set of parameters with their gradients and an optimizer of the same kind."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], lr: float = 1e-4) -> None:
        g = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
        self.raw = [torch.randn(s, generator=g) * 1e-2 for s in shapes]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.optimizer = torch.optim.AdamW(self.params, lr=lr, fused=True)

    def put_gradients(self, scale: float) -> None:
        """The same gradients again, multiplied."""
        for p, g in zip(self.params, self.raw, strict=True):
            torch.mul(g, scale, out=p.grad)
