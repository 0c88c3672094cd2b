"""Small trainings of many kinds that can go back, and what their whole state is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import stablenum_torch as st
from stablenum import RecoveryPolicy
from stablenum.typing import Response

__all__ = [
    "AGAIN",
    "KINDS",
    "Training",
    "halved",
    "made_nan",
    "network",
    "numbered",
    "same",
    "sgd",
    "whole_state",
]

# The same data follow again, so that the run after a fault of the machine is the one that would have been.
AGAIN = RecoveryPolicy(every=10, check_every=5, good_after=0, responses=(Response(skip_data=False),))


class Rows(Dataset):
    """20 rows of numbers, with noise from all generators where ``noisy``."""

    def __init__(self, noisy: bool = True) -> None:
        self.x = torch.randn(20, 6, generator=torch.Generator().manual_seed(11))
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + float(np.random.rand()) + random.random() if self.noisy else 0.0
        return self.x[i] + 0.01 * noise, self.x[i].sum(0, keepdim=True)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


class Training:
    """A model, its optimizer, its data, and whatever else a step changes.

    Args:
        data: makes the data.
        optimizer: makes the optimizer of some parameters.
        scheduler: makes the scheduler of an optimizer.
        dtype: the format of the parameters.
        average: whether an average of the weights is kept.
        buffers: whether a skipped step restores the buffers.
        **settings: of the guard.
    """

    def __init__(
        self,
        data: Callable[[], Any],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        dtype: torch.dtype = torch.float32,
        average: bool = False,
        buffers: bool = False,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        self.model, self.dtype = network().to(dtype), dtype
        inner = optimizer(list(self.model.parameters()))
        self.opt = st.wrap(inner, names=self.model, buffers=self.model if buffers else None, **settings)
        self.scheduler = None if scheduler is None else scheduler(self.opt)
        self.data = data()
        self.noise = torch.Generator().manual_seed(4)
        self.extra: dict[str, Any] = {"noise": self.noise}
        if average:
            self.extra["average"] = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)

    def recovery(self, policy: RecoveryPolicy = AGAIN, **options: Any) -> st.Recovery:
        given = {"data": self.data, "scheduler": self.scheduler, "extra": self.extra} | options
        return st.Recovery(self.model, self.opt, policy, **given)

    def step(self, batch: Any) -> float:
        x, y = batch
        x = x + 0.01 * torch.randn(x.shape, generator=self.noise)
        self.opt.zero_grad()
        loss = (self.model(x.to(self.dtype)) - y.to(self.dtype)).float().square().mean()
        self.opt.backward(loss)
        self.opt.step()
        if self.scheduler is not None:
            self.scheduler.step()
        if "average" in self.extra:
            self.extra["average"].update_parameters(self.model)
        return float(loss.detach())

    def run(
        self,
        steps: int = 45,
        *,
        hurt: Callable[[Training], object] | None = None,
        at: int = 33,
        recovery: st.Recovery | None = None,
        **options: Any,
    ) -> st.Recovery:
        """Train, and let ``hurt`` do its harm once, after the step ``at``."""
        recovery = recovery or self.recovery(**options)
        for batch in recovery.batches(steps):
            self.step(batch)
            if hurt is not None and recovery.step + 1 == at:
                hurt(self)
                hurt = None
        return recovery


def made_nan(training: Training) -> None:
    """Make one statistic of batch norm NaN, which the forward passes of a training do not read."""
    statistics: Any = training.model[1]  # type: ignore[index]
    statistics.running_var[3] = math.nan


def loader(**options: Any) -> Callable[[], Any]:
    """Return what makes a shuffled loader of 7 batches."""

    def make() -> Any:
        own = options.get("generator")
        given = options | ({"generator": torch.Generator().manual_seed(5)} if own else {})
        return DataLoader(Rows(), batch_size=3, shuffle=True, **given)

    return make


def numbered() -> Callable[[int], tuple[Tensor, Tensor]]:
    rows = Rows(noisy=False).x
    return lambda n: (
        rows[(7 * n) % 17 : (7 * n) % 17 + 3],
        rows[(7 * n) % 17 : (7 * n) % 17 + 3].sum(1, True),
    )


def stateful(**options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        # What the workers draw is not part of the loader's state.
        rows = Rows(noisy=not options.get("num_workers"))
        generator = torch.Generator().manual_seed(5)
        return StatefulDataLoader(rows, batch_size=3, shuffle=True, generator=generator, **options)

    return make


def adam(**options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, **{"lr": 1e-2, **options})


def halved(opt: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(opt, 12, gamma=0.5)


def one_cycle(opt: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=100)


def in_sequence(opt: torch.optim.Optimizer) -> Any:
    warm_up = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
    return torch.optim.lr_scheduler.SequentialLR(
        opt, [warm_up, torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)], [20]
    )


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, nesterov=True)


def master_weights(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return st.MasterWeights(params, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True))


def wide_moments(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Adam whose moments are float32 beside bfloat16 parameters, as other libraries have them."""

    class WideAdam(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    if not state:
                        state["step"] = 0
                        state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                        state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
                    state["step"] += 1
                    state["exp_avg"].lerp_(p.grad.float(), 0.1)
                    state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad.float(), p.grad.float(), value=0.01)
                    p.sub_((group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)).to(p.dtype))

    return WideAdam(params, {"lr": 1e-2})


KINDS: dict[str, Callable[[], Training]] = {
    "fused Adam, loss scale": lambda: Training(loader(), adam(fused=True), halved, loss_scale="dynamic"),
    "foreach Adam, own generator": lambda: Training(
        loader(generator=True), adam(foreach=True, amsgrad=True), one_cycle, average=True
    ),
    "Adam, learning rate in a tensor": lambda: Training(
        loader(), adam(lr=torch.tensor(0.01), fused=True), in_sequence
    ),
    "two workers": lambda: Training(loader(num_workers=2), sgd, one_cycle, clip=1.0),
    "SGD, function of the number": lambda: Training(numbered, sgd, halved, spike="skip"),
    "bfloat16": lambda: Training(loader(), adam(foreach=True), halved, dtype=torch.bfloat16),
    "bfloat16, float32 moments": lambda: Training(loader(), wide_moments, dtype=torch.bfloat16),
    "bfloat16, master weights": lambda: Training(loader(), master_weights, halved, dtype=torch.bfloat16),
    "stateful loader": lambda: Training(stateful(), adam(fused=True), halved),
    "stateful loader, two workers": lambda: Training(stateful(num_workers=2), adam(fused=True), halved),
}


def whole_state(training: Training) -> dict[str, Any]:
    """All that a training depends on."""
    return {
        "model": dict(training.model.state_dict()),
        "optimizer": training.opt.state_dict(),
        "scheduler": training.scheduler and training.scheduler.state_dict(),
        "extra": {
            name: thing.get_state() if name == "noise" else dict(thing.state_dict())
            for name, thing in training.extra.items()
        },
        "torch": torch.get_rng_state(),
        "numpy": list(np.random.get_state()),
        "python": random.getstate(),
    }


def same(a: Any, b: Any) -> bool:
    """Return whether two states have the same formats and bits; the values of NaN count as equal."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    return bool(type(a) is type(b) and a == b)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
