"""A small classifier in PyTorch, with switches for faults and for harmless rewritings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import stablenum_torch
from tests.lockfile.data import WEIGHTS, X, Y


class Classifier(nn.Module):
    """A hidden layer, a norm by hand, and a head."""

    def __init__(self, **switches: Any) -> None:
        super().__init__()
        self.switches = switches
        for name, array in WEIGHTS.items():
            setattr(self, name, nn.Parameter(torch.tensor(array)))

    def forward(self, x: Tensor) -> Tensor:
        s = self.switches
        h = x @ self.up.T + self.up_bias
        h = torch.tanh(h)
        if s.get("centred", True):
            h = h - h.mean(-1, keepdim=True)
        var = h.pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(var + s.get("epsilon", 1e-5)) * self.gain
        head = self.head.to(s.get("form", torch.float32))
        return (h.to(head.dtype) @ head.T).float() / s.get("temperature", 1.0)


def in_torch(*, rate: float = 1e-2, summed: bool = False, order: Any = None, **switches: Any) -> Any:
    """The classifier with a step of Adam. ``order`` permutes the batch."""
    model = Classifier(**switches)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    rows = slice(None) if order is None else order

    def loss(x: Tensor, y: Tensor) -> Tensor:
        logp = torch.log_softmax(model(x), -1)
        picked = logp[torch.arange(len(y)), y]
        return -picked.sum() if summed else -picked.mean()

    return stablenum_torch.program(
        loss, torch.tensor(X[rows]), torch.tensor(Y[rows]), model=model, optimizer=optimizer
    )


def program() -> Any:
    """The classifier as it is, for the command."""
    return in_torch()
