"""PyTorch on a CPU: what the guard adds to a bare fused AdamW step, against GradScaler + clip_grad_norm_."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import stablenum_torch
from benchmarks.timing import interleaved

__all__ = ["Variant", "run"]

SIZES: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "38 M in 108 tensors": ([(350, 1000)] * 108, 31),
    "1 M in 2000 tensors": ([(500,)] * 2000, 31),
    "10 k in 10 tensors": ([(1000,)] * 10, 301),
}
SCALE = 1024.0
MAX_NORM = 1.0


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


def run() -> list[dict[str, Any]]:
    """One row a size."""
    return [_one_size(name, shapes, rounds) for name, (shapes, rounds) in SIZES.items()]


def _one_size(size: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    bare, clip_only, peer, fold, idle = (Variant(shapes) for _ in range(5))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.ones(()))
    guarded = stablenum_torch.wrap(
        fold.optimizer, clip=MAX_NORM, loss_scale=stablenum_torch.DynamicLossScale(init_scale=SCALE)
    )
    watching = stablenum_torch.wrap(idle.optimizer, clip=1e30)

    def clip_step() -> None:
        torch.nn.utils.clip_grad_norm_(clip_only.params, MAX_NORM)
        clip_only.optimizer.step()

    def peer_step() -> None:
        scaler.unscale_(peer.optimizer)
        torch.nn.utils.clip_grad_norm_(peer.params, MAX_NORM)
        scaler.step(peer.optimizer)
        scaler.update()

    inputs = {
        "bare": (bare, 1.0),
        "clip_grad_norm_": (clip_only, 1.0),
        "GradScaler + clip_grad_norm_": (peer, SCALE),
        "stablenum, scale and clip folded in": (fold, SCALE),
        "stablenum, multiplier 1": (idle, 1.0),
    }

    def prepare(name: str) -> None:
        variant, scale = inputs[name]
        variant.put_gradients(scale)

    times = interleaved(
        {
            "bare": bare.optimizer.step,
            "clip_grad_norm_": clip_step,
            "GradScaler + clip_grad_norm_": peer_step,
            "stablenum, scale and clip folded in": guarded.step,
            "stablenum, multiplier 1": watching.step,
        },
        rounds=rounds,
        prepare=prepare,
    )
    for ours, theirs in zip(fold.params, peer.params, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    base = times["bare"].median
    extra = times["GradScaler + clip_grad_norm_"].median - base
    return {
        "size": size,
        "times": {name: t.as_dict() for name, t in times.items()},
        "extra over bare / GradScaler + clip's extra": {
            name: round((times[name].median - base) / extra, 3)
            for name in times
            if name.startswith("stablenum")
        },
    }
