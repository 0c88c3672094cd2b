"""PyTorch: parameters with gradients and a fused AdamW, for measuring the cost of rules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Variant"]


class Variant:
    """A set of parameters with gradients, and an AdamW of its own."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], lr: float = 1e-4) -> None:
        g = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(s, generator=g)) for s in shapes]
        self.raw = [torch.randn(s, generator=g) * 1e-2 for s in shapes]
        for p in self.params:
            p.grad = torch.zeros_like(p)
        self.optimizer = torch.optim.AdamW(self.params, lr=lr, fused=True)

    def put_gradients(self, scale: float) -> None:
        """Write the same gradients again, multiplied by ``scale``."""
        for p, g in zip(self.params, self.raw, strict=True):
            torch.mul(g, scale, out=p.grad)
