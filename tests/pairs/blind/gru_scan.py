"""Sequence regression with a hand-written GRU.

PyTorch: one Linear per gate, a Python loop over time, packed lengths handled by a mask.
JAX: fused gate matrices, `lax.scan` over time, and our own Adam written as an optax transformation.
"""
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn

import stablenum_jax
import stablenum_torch

N_IN, N_HID, N_OUT = 9, 16, 3
STEP_SIZE, BETA1, BETA2, ADAM_EPS = 1e-2, 0.9, 0.99, 1e-7


def sequences():
    rng = np.random.default_rng(404)
    x = rng.normal(size=(4, 8, N_IN)).astype(np.float32)
    lengths = np.array([8, 5, 7, 3])
    y = rng.normal(size=(4, N_OUT)).astype(np.float32)
    return x, lengths, y


class GRUCell(nn.Module):
    def __init__(self, n_in, n_hid):
        super().__init__()
        self.xr, self.hr = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid, bias=False)
        self.xz, self.hz = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid, bias=False)
        self.xn, self.hn = nn.Linear(n_in, n_hid), nn.Linear(n_hid, n_hid)

    def forward(self, x, h):
        r = torch.sigmoid(self.xr(x) + self.hr(h))
        z = torch.sigmoid(self.xz(x) + self.hz(h))
        n = torch.tanh(self.xn(x) + r * self.hn(h))
        return (1 - z) * n + z * h


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = GRUCell(N_IN, N_HID)
        self.readout = nn.Sequential(nn.Linear(N_HID, N_HID), nn.ELU(), nn.Linear(N_HID, N_OUT))

    def forward(self, x, lengths):
        h = x.new_zeros(x.shape[0], N_HID)
        for t in range(x.shape[1]):
            alive = (t < lengths).unsqueeze(1)
            h = torch.where(alive, self.cell(x[:, t], h), h)
        return self.readout(h)


def left():
    torch.manual_seed(50)
    model = Regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=STEP_SIZE, betas=(BETA1, BETA2), eps=ADAM_EPS)

    def loss_fn(x, lengths, y):
        return nn.functional.smooth_l1_loss(model(x, lengths), y, beta=0.5)

    batch = [torch.tensor(a) for a in sequences()]
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=optimizer)


# ---- JAX side ----


class AdamState(NamedTuple):
    step: jax.Array
    m: optax.Params
    v: optax.Params


def our_adam(lr, b1, b2, eps):
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(grads, state, params=None):
        step = state.step + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.v, grads)
        t = step.astype(jax.tree.leaves(grads)[0].dtype)

        def delta(m, v):
            m_hat = m / (1 - b1**t)
            v_hat = v / (1 - b2**t)
            return -lr * m_hat / (jnp.sqrt(v_hat) + eps)

        return jax.tree.map(delta, m, v), AdamState(step, m, v)

    return optax.GradientTransformation(init, update)


def gru_step(gru, h, inputs):
    x_gates, alive = inputs
    h_gates = h @ gru["w_h"]
    xr, xz, xn = jnp.split(x_gates, 3, axis=-1)
    hr, hz, hn = jnp.split(h_gates, 3, axis=-1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * (hn + gru["b_hn"]))
    new_h = n + z * (h - n)
    return jnp.where(alive[:, None], new_h, h), None


def predict(params, x, lengths):
    gru = params["gru"]
    x_gates = jnp.einsum("bti,ij->tbj", x, gru["w_x"]) + gru["b_x"]
    alive = jnp.arange(x.shape[1])[:, None] < lengths[None, :]
    h0 = jnp.zeros((x.shape[0], N_HID), x_gates.dtype)
    h, _ = jax.lax.scan(lambda h, inp: gru_step(gru, h, inp), h0, (x_gates, alive))
    first, second = params["readout"]
    return jax.nn.elu(h @ first["w"] + first["b"]) @ second["w"] + second["b"]


def huber(params, x, lengths, y):
    beta = 0.5
    distance = jnp.abs(predict(params, x, lengths) - y)
    return jnp.where(distance < beta, 0.5 * distance**2 / beta, distance - 0.5 * beta).mean()


def init_params(key):
    keys = iter(jax.random.split(key, 8))

    def uniform(*shape):
        return jax.random.uniform(next(keys), shape, minval=-1.0, maxval=1.0) / np.sqrt(N_HID)

    gru = {"w_x": uniform(N_IN, 3 * N_HID), "b_x": uniform(3 * N_HID), "w_h": uniform(N_HID, 3 * N_HID), "b_hn": uniform(N_HID)}
    readout = [{"w": uniform(N_HID, n), "b": uniform(n)} for n in (N_HID, N_OUT)]
    return {"gru": gru, "readout": readout}


def right():
    optimizer = our_adam(STEP_SIZE, BETA1, BETA2, ADAM_EPS)
    return stablenum_jax.program(huber, init_params(jax.random.key(9)), *map(jnp.asarray, sequences()), optimizer=optimizer)
