"""Small programs of both frameworks with switches for faults and for harmless rewritings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import Tensor, nn

import stablenum_jax
import stablenum_torch

_DRAWS = np.random.default_rng(5)
X = _DRAWS.normal(size=(12, 8)).astype(np.float32)
Y = _DRAWS.integers(0, 5, 12)
WEIGHTS: Mapping[str, Any] = {
    name: (_DRAWS.normal(size=shape) / 3).astype(np.float32)
    for name, shape in {"up": (16, 8), "up_bias": (16,), "gain": (16,), "head": (5, 16)}.items()
}


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


def in_jax(*, rate: float = 1e-2, epsilon: float = 1e-5, form: Any = jnp.float32, **switches: Any) -> Any:
    """The same with optax."""
    params = {name: jnp.asarray(array) for name, array in WEIGHTS.items()}

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = jnp.tanh(x @ p["up"].T + p["up_bias"])
        if switches.get("centred", True):
            h = h - h.mean(-1, keepdims=True)
        var = jnp.square(h).mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(var + epsilon) * p["gain"]
        logits = (h.astype(form) @ p["head"].T.astype(form)).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits / switches.get("temperature", 1.0))
        return -jnp.take_along_axis(logp, y[:, None], 1).mean()

    return stablenum_jax.program(
        loss, params, jnp.asarray(X), jnp.asarray(Y), optimizer=optax.adam(rate)
    )


PROGRAMS = {"torch": in_torch, "jax": in_jax}
