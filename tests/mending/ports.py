"""A small network in PyTorch and its port to JAX, into which mistakes are planted."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PORT", "with_mistakes"]

PORT = '''"""A network and its port."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

RATE = 0.05


def data():
    rng = np.random.default_rng(0)
    arrays = {"up": (6, 8), "down": (8, 3), "shift": (3,)}
    params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}
    return params, rng.normal(size=(5, 6)).astype(np.float32)


def left():
    params, x = data()
    model = torch.nn.ParameterDict({name: torch.tensor(array) for name, array in params.items()})

    def loss(x):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0)
        hidden = F.gelu((x - mean) / torch.sqrt(var + 1e-3) @ model["up"])
        out = hidden @ model["down"] + model["shift"]
        return (out.softmax(-1) ** 2).sum(1).mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    return stablenum_torch.program(loss, torch.tensor(x), model=model, optimizer=optimizer)


def loss_of(params, x):
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    hidden = jax.nn.gelu((x - mean) / jnp.sqrt(var + 1e-3) @ params["up"], approximate=False)
    out = hidden @ params["down"] + params["shift"]
    return (jax.nn.softmax(out, axis=-1) ** 2).sum(1).mean()


def right():
    params, x = data()
    optimizer = optax.sgd(RATE, momentum=0.9)
    return stablenum_jax.program(loss_of, params, jnp.asarray(x), optimizer=optimizer)
'''


def with_mistakes(*mistakes: Sequence[str]) -> str:
    """The text of the pair in which each first text is replaced by the second one."""
    text = PORT
    for old, new in mistakes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
