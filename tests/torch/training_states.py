"""Small trainings whose states are saved, and the places in them where poison is planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stablenum_torch as st

__all__ = ["FORMATS", "Training", "same_state", "tensors_of"]

FORMATS = ("torch", "safetensors", "dcp")


class Net(nn.Module):
    """Has parameters, running statistics, tied weights and a mask with -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.out.weight
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x)).relu()
        return self.tied(self.out(hidden) @ self.mask.softmax(-1))


class Training:
    """A model, its guarded optimizer, and what else a run has."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.opt = st.wrap(inner, clip=1.0, loss_scale="dynamic", spike="skip", names=self.model)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=1)
        self.extra: dict[str, Any] = {"epoch": 0, "best": math.inf}

    def state(self, **more: Any) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.opt, "scheduler": self.scheduler}
        return parts | {"extra": self.extra} | more

    def train(self, steps: int, start: int = 0) -> Training:
        for step in range(start, start + steps):
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(8, 4, generator=draw)
            self.opt.zero_grad()
            loss = self.model(x * (math.nan if step == 1 else 1.0)).square().mean()
            self.opt.backward(loss)
            self.opt.step()
            if math.isfinite(loss.item()):
                self.scheduler.step(loss.item())
            else:  # the forward pass has poisoned the running statistics
                self.model.norm.reset_running_stats()
        return self


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """The live tensors with real numbers, by name; a test may plant poison in them."""
    found: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{name}.{key}")

    for key, value in state.items():
        take: Callable[[], Any] | None = getattr(value, "state_dict", None)
        walk(take() if take else value, key)
    return found


def same_state(a: Any, b: Any) -> bool:
    """Whether two states are equal to the bit, with the types of all values."""
    if isinstance(a, Tensor):
        same = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        bits = (a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
        return same and torch.equal(*bits)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same_state(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_state, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))
