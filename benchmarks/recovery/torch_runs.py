"""The trainings in PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import stablenum_torch
from benchmarks.recovery.data import Batch
from benchmarks.recovery.runs import (
    AVERAGE,
    COMMON,
    HEADS,
    LAYERS,
    MOMENTUM,
    RARE,
    RATES,
    SETTINGS,
    first_weights,
    schedule,
)

__all__ = ["TorchRun"]

Array = np.ndarray[Any, Any]


class _Digits(nn.Module):
    """Two layers with batch norm, the first with weights for each source."""

    statistics = "var0"

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__()
        self.w = nn.ParameterDict({name: torch.tensor(value) for name, value in weights.items()})
        for i in range(2):
            self.register_buffer(f"mean{i}", torch.zeros_like(self.w[f"shift{i}"]))
            self.register_buffer(f"var{i}", torch.ones_like(self.w[f"gain{i}"]))

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        x = torch.where(source[:, None] == 1, x @ self.w[RARE], x @ self.w[COMMON])
        x = torch.relu(self._normalized(x, 0)) @ self.w["inner"]
        return torch.relu(self._normalized(x, 1)) @ self.w["head"] + self.w["bias"]

    def _normalized(self, x: Tensor, i: int) -> Tensor:
        mean, var = getattr(self, f"mean{i}"), getattr(self, f"var{i}")
        gain, shift = self.w[f"gain{i}"], self.w[f"shift{i}"]
        return functional.batch_norm(x, mean, var, gain, shift, training=self.training, momentum=MOMENTUM)

    def after_step(self) -> None:
        """Batch norm has updated its statistics in the forward pass."""


class _Transformer(nn.Module):
    """A causal transformer with embeddings for each source, and an averaged copy to evaluate."""

    statistics = "average_head"

    def __init__(self, weights: dict[str, Array]) -> None:
        super().__init__()
        self.w = nn.ParameterDict({name: torch.tensor(value) for name, value in weights.items()})
        for name, value in self.w.items():
            self.register_buffer(f"average_{name}", value.detach().clone())

    def forward(self, tokens: Tensor, source: Tensor) -> Tensor:
        w: Any = self.w if self.training else {name: getattr(self, f"average_{name}") for name in self.w}
        x = torch.where(source[:, None, None] == 1, w[RARE][tokens], w[COMMON][tokens])
        x = x + w["places"][: tokens.shape[1]]
        for i in range(LAYERS):
            q, k, v = (_normalized(x, w[f"gain{2 * i}"]) @ w[f"qkv{i}"]).chunk(3, dim=-1)
            heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
            attended = (
                functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
            )
            x = x + attended @ w[f"out{i}"]
            x = x + functional.gelu(_normalized(x, w[f"gain{2 * i + 1}"]) @ w[f"up{i}"]) @ w[f"down{i}"]
        return _normalized(x, w[f"gain{2 * LAYERS}"]) @ w["head"]

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the averaged copy towards the weights."""
        averages = [getattr(self, f"average_{name}") for name in self.w]
        torch._foreach_lerp_(averages, list(self.w.values()), 1.0 - AVERAGE)


def _normalized(x: Tensor, gain: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gain)


MODELS = {"digits": _Digits, "transformer": _Transformer}


def _tensors(batch: Batch) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in batch)


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    x, source, targets, weights = _tensors(batch)
    logits = model(x, source)
    each = functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none").view(
        targets.shape
    )
    return (weights * each.flatten(1).mean(1)).mean() if each.ndim > 1 else (weights * each).mean()


class TorchRun:
    """A training in PyTorch; see :class:`benchmarks.recovery.runs.Run`.

    Args:
        program: ``"digits"`` or ``"transformer"``.
        seed: of the first weights.
        held_out: what it is evaluated on.
        guard: the guard's settings; None for a plain optimizer.
    """

    def __init__(self, program: str, seed: int, held_out: Batch, guard: dict[str, Any] | None = None) -> None:
        self.model = MODELS[program](first_weights(program, seed))
        self._held_out, self.outside = held_out, 1.0
        rare, rate = self.model.w[RARE], RATES[program]
        others = [p for p in self.model.w.values() if p is not rare]
        groups = [{"params": others}, {"params": [rare]}]
        self._inner = torch.optim.AdamW(groups, lr=rate, fused=True, **SETTINGS)
        self.optimizer: torch.optim.Optimizer = self._inner
        if guard is not None:
            self.optimizer = stablenum_torch.wrap(self._inner, names=self.model, **guard)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def step(self, batch: Batch) -> float:
        self.optimizer.zero_grad()
        loss = _loss(self.model, batch)
        if isinstance(self.optimizer, stablenum_torch.GuardedOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()
        group = self.optimizer.param_groups[1]
        rate = group["lr"]
        group["lr"] = rate * self.outside
        self.optimizer.step()
        group["lr"] = rate
        self.scheduler.step()
        self.model.after_step()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        loss = float(_loss(self.model, self._held_out))
        self.model.train()
        return loss

    def finite(self) -> bool:
        moments = [x for state in self._inner.state.values() for x in state.values()]
        return all(bool(x.isfinite().all()) for x in (*self.model.state_dict().values(), *moments))

    def updates(self) -> int:
        return int(self._rare_state()["step"])

    def _rare_state(self) -> dict[str, Tensor]:
        return dict(self._inner.state[self.model.w[RARE]])

    @torch.no_grad()
    def edit(self, what: str, change: Callable[[Array], Array]) -> None:
        found = {
            "rare": lambda: self.model.w[RARE],
            "statistics": lambda: getattr(self.model, self.model.statistics),
            "m": lambda: self._rare_state()["exp_avg"],
            "v": lambda: self._rare_state()["exp_avg_sq"],
        }[what]()
        found.copy_(torch.from_numpy(change(found.detach().numpy().copy())))

    def set_rate(self, factor: float) -> None:
        initial = self.optimizer.param_groups[0]["initial_lr"]
        self.scheduler.base_lrs[1] = initial * factor
        self.optimizer.param_groups[1]["lr"] = self.optimizer.param_groups[0]["lr"] * factor

    def save(self) -> Any:
        kept = {name: part.state_dict() for name, part in self._parts().items()}
        return copy.deepcopy(kept)

    def load(self, saved: Any) -> None:
        for name, part in self._parts().items():
            part.load_state_dict(copy.deepcopy(saved[name]))

    def recovery(self, data: Callable[[int], Batch], **policy: Any) -> stablenum_torch.Recovery:
        opt: Any = self.optimizer
        return stablenum_torch.Recovery(self.model, opt, data=data, scheduler=self.scheduler, **policy)

    def _parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
