"""A classifier whose loss and gradients agree. The two AdamW have other defaults, so the update does not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import stablenum_jax
import stablenum_torch

x = np.random.default_rng(0).normal(size=(16, 10)).astype(np.float32)
y = np.arange(16) % 4


def left():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_fn(x, y):
        return nn.functional.cross_entropy(model(x), y)

    return stablenum_torch.program(
        loss_fn, torch.tensor(x), torch.tensor(y), model=model, optimizer=optimizer
    )


def right():
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {"kernel": jax.random.normal(first, (10, 32)), "bias": jnp.zeros(32)},
        "out": {"kernel": jax.random.normal(second, (32, 4)), "bias": jnp.zeros(4)},
    }
    optimizer = optax.adamw(1e-3)

    def loss_fn(params, x, y):
        h = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = h @ params["out"]["kernel"] + params["out"]["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return stablenum_jax.program(loss_fn, params, x, y, optimizer=optimizer)
