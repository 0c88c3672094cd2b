"""A small network on scikit-learn's handwritten digits, trained the same way in any format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stablenum_torch as st


class Digits(NamedTuple):
    """Images as (n, 64) in [0, 1] and their labels."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Digits:
    """1,297 to train on and 500 to test on."""
    found = load_digits()
    x, y = torch.from_numpy(found.data).float() / 16, torch.from_numpy(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Digits(x[500:], y[500:], x[:500], y[:500])


def network(width: int = 64) -> nn.Module:
    """Two hidden layers and an output layer for the ten digits."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def train(
    data: Digits,
    *,
    policy: Any = None,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 400,
    spoil: int | None = None,
    decay: bool = False,
) -> tuple[nn.Module, st.GuardedOptimizer]:
    """The network after ``steps`` batches of 96; at step ``spoil`` one pixel is inf."""
    model = network()
    if policy is not None:
        st.precision(model, policy)
    make = make or (lambda ps: torch.optim.AdamW(ps, lr=3e-3))
    opt = st.wrap(make(list(model.parameters())))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) if decay else None
    g = torch.Generator().manual_seed(2)
    for step in range(steps):
        chosen = torch.randint(len(data.x), (96,), generator=g)
        x = data.x[chosen]
        if step == spoil:
            x[0, 5] = torch.inf
        opt.zero_grad()
        opt.backward(F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), data.y[chosen]))
        opt.step()
        if schedule is not None:
            schedule.step()
    return model, opt


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """The fraction of test images classified correctly."""
    dtype = next(model.parameters()).dtype
    return float((model(data.test_x.to(dtype)).argmax(1) == data.test_y).float().mean())
