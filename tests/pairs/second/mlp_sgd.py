"""MLP regression with clipped Nesterov SGD and a warmup: torch.optim and a hand-written JAX update."""
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

FEATURES, HIDDEN, TARGETS = 10, 32, 3
BASE_LR, MOMENTUM, WEIGHT_DECAY, MAX_NORM, WARMUP, BETA = 0.25, 0.9, 1e-3, 0.25, 4, 0.5


def make_batch():
    rng = np.random.default_rng(51)
    features = (3.0 * rng.normal(size=(8, FEATURES)) + 1.0).astype(np.float32)
    mixing = rng.normal(size=(FEATURES, TARGETS))
    targets = (np.sin(features @ mixing) + 0.1 * rng.normal(size=(8, TARGETS))).astype(np.float32)
    return features, targets


# ---------------------------------------------------------------- PyTorch

class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.input = nn.Linear(FEATURES, HIDDEN)
        self.hidden = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(2)])
        self.output = nn.Linear(HIDDEN, TARGETS)

    def standardize(self, x):
        centred = x - x.mean(dim=0)
        return centred / (x.std(dim=0) + 1e-6)

    def forward(self, x):
        x = F.silu(self.input(self.standardize(x)))
        for layer in self.hidden:
            x = x + F.silu(layer(x))
        return self.output(x)


def clip_before_step(optimizer, args, kwargs):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def make_optimizer(model):
    optimizer = torch.optim.SGD(
        model.parameters(), lr=BASE_LR, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY)
    optimizer.register_step_pre_hook(clip_before_step)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    return optimizer, scheduler


def left():
    torch.manual_seed(19)
    model = Regressor()
    optimizer, _ = make_optimizer(model)

    def loss_fn(features, targets):
        return F.smooth_l1_loss(model(features), targets, beta=BETA)

    features, targets = make_batch()
    return stablenum_torch.program(
        loss_fn, torch.from_numpy(features), torch.from_numpy(targets), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- plain JAX

def init_dense(key, inputs, outputs):
    kernel_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    return {
        "kernel": jax.random.uniform(kernel_key, (inputs, outputs), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(bias_key, (outputs,), minval=-bound, maxval=bound),
    }


def init_params(key):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    return {
        "input": init_dense(k1, FEATURES, HIDDEN),
        "hidden": [init_dense(k2, HIDDEN, HIDDEN), init_dense(k3, HIDDEN, HIDDEN)],
        "output": init_dense(k4, HIDDEN, TARGETS),
    }


def dense(layer, x):
    return jnp.einsum("...i,io->...o", x, layer["kernel"]) + layer["bias"]


def silu(x):
    return x * jax.nn.sigmoid(x)


def standardize(x):
    mean = jnp.mean(x, axis=0, keepdims=True)
    deviation = jnp.std(x, axis=0, keepdims=True, ddof=1)
    return (x - mean) / (deviation + 1e-6)


def predict(params, features):
    x = silu(dense(params["input"], standardize(features)))
    for layer in params["hidden"]:
        x = x + silu(dense(layer, x))
    return dense(params["output"], x)


def loss_fn(params, features, targets):
    error = jnp.abs(predict(params, features) - targets)
    quadratic = jnp.minimum(error, BETA)
    linear = error - quadratic
    return jnp.mean(0.5 * quadratic**2 / BETA + linear)


class MomentumState(NamedTuple):
    count: jax.Array
    velocity: Any


def clip_gradients(gradients, max_norm):
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return jax.tree.map(lambda g: g * factor, gradients)


def momentum_sgd():
    def init(params):
        return MomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(gradients, state, params):
        gradients = clip_gradients(gradients, MAX_NORM)
        gradients = jax.tree.map(lambda g, p: g + WEIGHT_DECAY * p, gradients, params)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state.velocity, gradients)
        direction = jax.tree.map(lambda v, g: g + MOMENTUM * v, velocity, gradients)
        rate = BASE_LR * jnp.minimum(1.0, (state.count + 1) / WARMUP)
        updates = jax.tree.map(lambda d: -rate * d, direction)
        return updates, MomentumState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)


def right():
    features, targets = make_batch()
    params = init_params(jax.random.key(23))
    optimizer = momentum_sgd()
    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(features), jnp.asarray(targets), optimizer=optimizer)
