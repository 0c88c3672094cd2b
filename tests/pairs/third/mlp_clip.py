"""MLP regression with micro-batches, a quantised first layer, loss scaling, clipping and SGD: PyTorch and plain JAX."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

FEATURES, HIDDEN, OUTPUTS = 10, 24, 3
MICRO_BATCHES = 4
STEP_SIZE = 1 / 32
LOSS_SCALE = 256.0
MAX_NORM = 0.5
PEAK_RATE, MOMENTUM, WEIGHT_DECAY, WARMUP = 0.25, 0.9, 1e-3, 8


def make_batch():
    rng = np.random.default_rng(41)
    inputs = rng.normal(size=(8, FEATURES)).astype(np.float32)
    mixing = rng.normal(size=(FEATURES, OUTPUTS)).astype(np.float32)
    targets = np.tanh(inputs @ mixing) + 0.5 + 0.1 * rng.normal(size=(8, OUTPUTS)).astype(np.float32)
    return inputs, targets.astype(np.float32)


# ---------------------------------------------------------------- PyTorch

class QuantLinear(nn.Linear):
    """Linear layer whose weight is rounded to a grid; gradients pass straight through."""

    def forward(self, x):
        rounded = torch.round(self.weight / STEP_SIZE) * STEP_SIZE
        weight = self.weight + (rounded - self.weight).detach()
        return F.linear(x, weight, self.bias)


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = QuantLinear(FEATURES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.fc3 = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x):
        x = F.elu(self.fc1(x))
        x = F.softplus(self.fc2(x))
        return self.fc3(x)


class ClippedSGD(torch.optim.SGD):
    """SGD that removes the loss scale and clips the global norm before its step."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.grad.div_(LOSS_SCALE)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def left():
    torch.manual_seed(15)
    model = Regressor()
    inputs, targets = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(inputs, targets):
        total = inputs.new_zeros(())
        for x, y in zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)):
            predicted = model(x)
            micro = F.mse_loss(predicted, y)
            total = total + micro / MICRO_BATCHES
        return total * LOSS_SCALE

    optimizer = ClippedSGD(model.parameters(), lr=PEAK_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    return stablenum_torch.program(loss_fn, inputs, targets, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX

def init_dense(key, fan_in, fan_out):
    k1, k2 = jax.random.split(key)
    return {"w": jax.random.normal(k1, (fan_in, fan_out)) / np.sqrt(fan_in),
            "b": 0.1 * jax.random.normal(k2, (fan_out,))}


def init_network(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {"first": init_dense(k1, FEATURES, HIDDEN),
            "second": init_dense(k2, HIDDEN, HIDDEN),
            "third": init_dense(k3, HIDDEN, OUTPUTS)}


def dense(layer, h):
    return h @ layer["w"] + layer["b"]


def quantised_dense(layer, h):
    w = layer["w"]
    on_grid = STEP_SIZE * jnp.round(w / STEP_SIZE)
    w = w - jax.lax.stop_gradient(w - on_grid)
    return h @ w + layer["b"]


def predict(network, h):
    h = quantised_dense(network["first"], h)
    h = jax.nn.elu(h)
    h = dense(network["second"], h)
    h = jax.nn.softplus(h)
    return dense(network["third"], h)


def scaled_loss(network, inputs, targets):
    xs = inputs.reshape(MICRO_BATCHES, -1, FEATURES)
    ys = targets.reshape(MICRO_BATCHES, -1, OUTPUTS)

    def body(running, micro_batch):
        x, y = micro_batch
        error = jnp.mean((predict(network, x) - y) ** 2)
        running = running + error / MICRO_BATCHES
        return running, None

    running, _ = jax.lax.scan(body, jnp.zeros((), inputs.dtype), (xs, ys))
    return LOSS_SCALE * running


def clip_global_norm(max_norm):
    """Like torch.nn.utils.clip_grad_norm_, with 1e-6 in the denominator."""
    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def warmup_schedule(count):
    return PEAK_RATE * jnp.minimum(1.0, (count + 1) / WARMUP)


def make_transformation():
    return optax.chain(
        optax.scale(1 / LOSS_SCALE),
        clip_global_norm(MAX_NORM),
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.trace(decay=MOMENTUM),
        optax.scale_by_learning_rate(warmup_schedule),
    )


def right():
    network = init_network(jax.random.key(16))
    inputs, targets = (jnp.asarray(a) for a in make_batch())
    tx = make_transformation()
    return stablenum_jax.program(scaled_loss, network, inputs, targets, optimizer=tx)
