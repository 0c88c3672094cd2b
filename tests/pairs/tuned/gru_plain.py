"""Forecasting with a two-layer GRU over a short series. PyTorch original (nn.GRU) and plain JAX port (lax.scan)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn

INPUTS, HIDDEN, LAYERS, OUTPUTS, STEPS = 5, 16, 2, 3, 10
LR, BETA1, BETA2, EPS, DECAY = 2e-3, 0.9, 0.99, 1e-6, 0.02


def make_batch():
    rng = np.random.default_rng(42)
    series = rng.normal(size=(6, STEPS, INPUTS)).astype(np.float32)
    series = np.cumsum(series, axis=1) * 0.4
    targets = rng.normal(size=(6, OUTPUTS)).astype(np.float32)
    return series, targets


# ---------------------------------------------------------------- PyTorch


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(INPUTS)
        self.gru = nn.GRU(INPUTS, HIDDEN, num_layers=LAYERS, batch_first=True)
        self.hidden = nn.Linear(2 * HIDDEN, HIDDEN)
        self.readout = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, series):
        states, last = self.gru(self.norm(series))
        average = states.mean(dim=1)
        summary = torch.cat([last[-1], average], dim=-1)
        return self.readout(torch.tanh(self.hidden(summary)))


def left():
    torch.manual_seed(6)
    model = Forecaster()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    series, targets = make_batch()
    mse = nn.MSELoss()

    def loss_fn(series, targets):
        prediction = model(series)
        return mse(prediction, targets)

    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    return stablenum_torch.program(
        loss_fn, torch.from_numpy(series), torch.from_numpy(targets), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- JAX


def init_params(key):
    def uniform(key, shape, fan):
        return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0) / np.sqrt(fan)

    keys = iter(jax.random.split(key, 4 * LAYERS + 6))
    cells = []
    for layer in range(LAYERS):
        inputs = INPUTS if layer == 0 else HIDDEN
        cells.append(
            {
                "wi": uniform(next(keys), (inputs, 3 * HIDDEN), HIDDEN),
                "wh": uniform(next(keys), (HIDDEN, 3 * HIDDEN), HIDDEN),
                "bi": uniform(next(keys), (3 * HIDDEN,), HIDDEN),
                "bh": uniform(next(keys), (3 * HIDDEN,), HIDDEN),
            }
        )
    return {
        "norm": {"scale": 1.0 + uniform(next(keys), (INPUTS,), 50), "shift": uniform(next(keys), (INPUTS,), 50)},
        "cells": cells,
        "hidden": {"w": uniform(next(keys), (2 * HIDDEN, HIDDEN), 2 * HIDDEN), "b": uniform(next(keys), (HIDDEN,), 32)},
        "readout": {"w": uniform(next(keys), (HIDDEN, OUTPUTS), HIDDEN), "b": uniform(next(keys), (OUTPUTS,), HIDDEN)},
    }


def layer_norm(p, x, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    var = x.var(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + eps) * p["scale"] + p["shift"]


def gru_cell(p, h, x):
    gates_x = x @ p["wi"] + p["bi"]
    gates_h = h @ p["wh"] + p["bh"]
    xr, xz, xn = jnp.split(gates_x, 3, axis=-1)
    hr, hz, hn = jnp.split(gates_h, 3, axis=-1)
    r = jax.nn.sigmoid(xr + hr)
    z = jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return n + z * (h - n)


def gru_layer(p, xs):
    """xs: (batch, time, features)."""

    def step(h, x):
        h = gru_cell(p, h, x)
        return h, h

    h0 = jnp.zeros((xs.shape[0], HIDDEN), xs.dtype)
    last, states = jax.lax.scan(step, h0, jnp.swapaxes(xs, 0, 1))
    return jnp.swapaxes(states, 0, 1), last


def predict(params, series):
    xs = layer_norm(params["norm"], series)
    for cell in params["cells"]:
        xs, last = gru_layer(cell, xs)
    summary = jnp.concatenate([last, xs.mean(axis=1)], axis=-1)
    hidden = jnp.tanh(summary @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["readout"]["w"] + params["readout"]["b"]


def mse_loss(params, series, targets):
    errors = predict(params, series) - targets
    return jnp.mean(errors**2)


def scale_by_adam():
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"count": jnp.zeros([], jnp.int32), "m": zeros, "v": zeros}

    def update(grads, state, params=None):
        count = state["count"] + 1
        m = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state["v"], grads)
        fix1 = 1 - BETA1**count
        fix2 = 1 - BETA2**count
        updates = jax.tree.map(lambda m, v: (m / fix1) / (jnp.sqrt(v / fix2) + EPS), m, v)
        return updates, {"count": count, "m": m, "v": v}

    return optax.GradientTransformation(init, update)


def right():
    series, targets = (jnp.asarray(a) for a in make_batch())
    params = init_params(jax.random.key(2))
    tx = optax.chain(optax.add_decayed_weights(DECAY), scale_by_adam(), optax.scale(-LR))
    return stablenum_jax.program(mse_loss, params, series, targets, optimizer=tx)
