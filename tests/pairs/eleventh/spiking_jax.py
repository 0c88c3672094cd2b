"""Recurrent spiking network on event streams: autograd.Function and loops in PyTorch, custom_vjp and scan in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

CHANNELS, HIDDEN, CLASSES, STEPS, BATCH = 18, 24, 5, 14, 6
THRESHOLD, SLOPE, OUT_DECAY = 1.0, 10.0, 0.9
RATE_TARGET, RATE_WEIGHT = 0.1, 2.0
LR, WARMUP = 2e-3, 8


def make_batch():
    rng = np.random.default_rng(8)
    labels = rng.integers(0, CLASSES, BATCH).astype(np.int32)
    rates = 0.15 + 0.3 * rng.random((CLASSES, CHANNELS))
    events = rng.random((BATCH, STEPS, CHANNELS)) < rates[labels][:, None]
    return events.astype(np.float32), labels


# ---------------------------------------------------------------- PyTorch


class FastSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (u,) = ctx.saved_tensors
        return grad_output / (1.0 + SLOPE * u.abs()) ** 2


class RecurrentLIF(nn.Module):
    def __init__(self, n_in, n_hidden):
        super().__init__()
        self.ff = nn.Linear(n_in, n_hidden, bias=False)
        self.rec = nn.Linear(n_hidden, n_hidden, bias=False)
        self.decay = nn.Parameter(torch.empty(n_hidden).uniform_(0.5, 2.5))
        nn.init.normal_(self.ff.weight, std=0.35)
        nn.init.normal_(self.rec.weight, std=0.2)

    def forward(self, events):
        current = self.ff(events)
        beta = torch.sigmoid(self.decay)
        mem = torch.zeros_like(current[:, 0])
        spk = torch.zeros_like(mem)
        out = []
        for t in range(events.size(1)):
            reset = THRESHOLD * spk.detach()
            mem = beta * mem + current[:, t] + self.rec(spk) - reset
            spk = FastSigmoid.apply(mem - THRESHOLD)
            out.append(spk)
        return torch.stack(out, dim=1)


class LeakyReadout(nn.Module):
    def __init__(self, n_hidden, n_classes):
        super().__init__()
        self.fc = nn.Linear(n_hidden, n_classes)

    def forward(self, spikes):
        currents = self.fc(spikes)
        v = torch.zeros_like(currents[:, 0])
        trace = []
        for c in currents.unbind(1):
            v = OUT_DECAY * v + (1 - OUT_DECAY) * c
            trace.append(v)
        return torch.stack(trace).mean(0)


class SpikingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = RecurrentLIF(CHANNELS, HIDDEN)
        self.readout = LeakyReadout(HIDDEN, CLASSES)

    def forward(self, events):
        spikes = self.hidden(events)
        return self.readout(spikes), spikes


# ---------------------------------------------------------------- JAX


@jax.custom_vjp
def spike(v):
    return jnp.heaviside(v, 0.0)


def spike_fwd(v):
    return spike(v), v


def spike_bwd(v, g):
    return (g * (SLOPE * jnp.abs(v) + 1.0) ** -2,)


spike.defvjp(spike_fwd, spike_bwd)


def init_params(key):
    k_in, k_rec, k_tau, k_out = jax.random.split(key, 4)
    return {
        "w_in": 0.35 * jax.random.normal(k_in, (CHANNELS, HIDDEN)),
        "w_rec": 0.2 * jax.random.normal(k_rec, (HIDDEN, HIDDEN)),
        "leak": jax.random.uniform(k_tau, (HIDDEN,), minval=0.5, maxval=2.5),
        "w_out": jax.random.normal(k_out, (HIDDEN, CLASSES)) / HIDDEN**0.5,
        "b_out": jnp.zeros(CLASSES),
    }


def network(params, events):
    leak = jax.nn.sigmoid(params["leak"])

    def step(carry, x):
        v, s, y = carry
        drive = x @ params["w_in"] + s @ params["w_rec"]
        v = leak * v + drive - THRESHOLD * jax.lax.stop_gradient(s)
        fired = spike(v - THRESHOLD)
        y = OUT_DECAY * y + (1 - OUT_DECAY) * (fired @ params["w_out"] + params["b_out"])
        return (v, fired, y), (fired, y)

    batch = events.shape[0]
    start = (jnp.zeros((batch, HIDDEN)), jnp.zeros((batch, HIDDEN)), jnp.zeros((batch, CLASSES)))
    _, (raster, trace) = jax.lax.scan(step, start, jnp.swapaxes(events, 0, 1))
    return jnp.mean(trace, axis=0), raster


def loss_fn(params, events, labels):
    logits, raster = network(params, events)
    picked = jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, CLASSES)
    rates = jnp.mean(raster, axis=(0, 1))
    excess = jnp.maximum(rates - RATE_TARGET, 0.0)
    return -jnp.sum(picked) / labels.shape[0] + RATE_WEIGHT * jnp.mean(excess**2)


def warmup(count):
    return LR * jnp.minimum(1.0, (count + 1) / WARMUP)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = SpikingNet()
    optimizer = torch.optim.Adamax(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: min(1.0, (epoch + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    events, labels = make_batch()

    def objective(events, labels):
        logits, spikes = model(events)
        activity = F.relu(spikes.mean(dim=(0, 1)) - RATE_TARGET).pow(2).mean()
        return F.cross_entropy(logits, labels) + RATE_WEIGHT * activity

    return stablenum_torch.program(
        objective, torch.from_numpy(events), torch.from_numpy(labels).long(), model=model, optimizer=optimizer
    )


def right():
    events, labels = map(jnp.asarray, make_batch())
    params = init_params(jax.random.key(4))
    return stablenum_jax.program(loss_fn, params, events, labels, optimizer=optax.adamax(warmup))
