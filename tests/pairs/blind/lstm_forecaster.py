"""One-step-ahead forecasting with an LSTM trained by truncated backpropagation through time.

The same matrix ("basis") projects the channels in and, transposed, the hidden state out again.
"""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import stablenum_jax
import stablenum_torch

CHANNELS = 12
HIDDEN = 12
CHUNK = 4
LR = 0.1
MAX_NORM = 0.05


def make_series(batch=5, steps=12):
    rng = np.random.default_rng(31)
    walk = rng.normal(size=(batch, steps + 1, CHANNELS)).cumsum(axis=1)
    walk = walk * rng.uniform(0.5, 2.0, size=(batch, 1, CHANNELS)) + rng.normal(size=(batch, 1, CHANNELS))
    return walk.astype(np.float32)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.basis = nn.Parameter(torch.randn(HIDDEN, CHANNELS) / CHANNELS**0.5)
        self.in_bias = nn.Parameter(0.1 * torch.randn(HIDDEN))
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.out_bias = nn.Parameter(0.1 * torch.randn(CHANNELS))

    def forward(self, series):
        z = torch.tanh(nn.functional.linear(series, self.basis, self.in_bias))
        state, outputs = None, []
        for chunk in z.split(CHUNK, dim=1):
            if state is not None:
                state = tuple(s.detach() for s in state)
            hidden, state = self.rnn(chunk, state)
            outputs.append(hidden)
        hidden = torch.cat(outputs, dim=1)
        return hidden @ self.basis + self.out_bias


def left():
    torch.manual_seed(17)
    model = Forecaster()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)

    def loss_fn(series):
        past, future = series[:, :-1], series[:, 1:]
        mean = past.mean(dim=1, keepdim=True)
        std = past.std(dim=1, keepdim=True)
        forecast = model((past - mean) / std)
        return nn.functional.mse_loss(forecast, (future - mean) / std)

    return stablenum_torch.program(loss_fn, torch.from_numpy(make_series()), model=model, optimizer=optimizer)


# JAX


class LSTM(eqx.Module):
    weight_ih: jax.Array
    weight_hh: jax.Array
    bias_ih: jax.Array
    bias_hh: jax.Array

    def __init__(self, size_in, size, key):
        keys = jax.random.split(key, 4)
        shapes = [(4 * size, size_in), (4 * size, size), (4 * size,), (4 * size,)]
        bound = size**-0.5
        values = [jax.random.uniform(k, s, minval=-bound, maxval=bound) for k, s in zip(keys, shapes)]
        self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh = values

    def __call__(self, carry, xs):
        def step(carry, x):
            h, c = carry
            gates = self.weight_ih @ x + self.bias_ih + self.weight_hh @ h + self.bias_hh
            i, f, g, o = jnp.split(gates, 4)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        return jax.lax.scan(step, carry, xs)


class ForecastModel(eqx.Module):
    basis: jax.Array
    in_bias: jax.Array
    rnn: LSTM
    out_bias: jax.Array

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.basis = jax.random.normal(k1, (HIDDEN, CHANNELS)) / CHANNELS**0.5
        self.in_bias = 0.1 * jax.random.normal(k2, (HIDDEN,))
        self.rnn = LSTM(HIDDEN, HIDDEN, k3)
        self.out_bias = 0.1 * jax.random.normal(k4, (CHANNELS,))

    def __call__(self, series):
        z = jnp.tanh(series @ self.basis.T + self.in_bias)
        carry = (jnp.zeros_like(z[0]), jnp.zeros_like(z[0]))
        outputs = []
        for start in range(0, z.shape[0], CHUNK):
            carry = jax.lax.stop_gradient(carry)
            carry, hidden = self.rnn(carry, z[start : start + CHUNK])
            outputs.append(hidden)
        return jnp.concatenate(outputs) @ self.basis + self.out_bias


def clip_by_norm(max_norm, eps=1e-6):
    def update(grads, state, params=None):
        factor = jnp.minimum(1.0, max_norm / (optax.global_norm(grads) + eps))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def forecast_loss(model, series):
    past, future = series[:, :-1], series[:, 1:]
    mean = jnp.mean(past, axis=1, keepdims=True)
    std = jnp.std(past, axis=1, keepdims=True, ddof=1)
    forecast = jax.vmap(model)((past - mean) / std)
    return jnp.mean((forecast - (future - mean) / std) ** 2)


def right():
    model = ForecastModel(jax.random.PRNGKey(4))
    optimizer = optax.chain(clip_by_norm(MAX_NORM), optax.sgd(LR, momentum=0.9))
    return stablenum_jax.program(forecast_loss, model, jnp.asarray(make_series()), optimizer=optimizer)
