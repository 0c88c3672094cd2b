"""WaveNet with weight norm and a speaker embedding: PyTorch on (batch, channels, time), equinox under vmap."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import stablenum_jax
import stablenum_torch

LEVELS, RES, SKIP, KERNEL = 24, 9, 12, 3
DILATIONS = (1, 2, 4, 1, 2)
SPEAKERS, SPEAKER_DIM = 5, 4
LR, MOMENTUM, MAX_NORM = 0.05, 0.9, 0.1


def make_batch():
    rng = np.random.default_rng(17)
    t = np.arange(41) / 41
    freq = rng.uniform(2, 9, (3, 1))
    wave = 0.6 * np.sin(2 * np.pi * freq * t) + 0.15 * rng.normal(size=(3, 41))
    return np.clip(wave, -1, 1).astype(np.float32), np.array([3, 0, 4], np.int32)


# ---------------------------------------------------------------- PyTorch


def conv1d(*args, **kwargs):
    conv = nn.Conv1d(*args, **kwargs)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv


class CausalConv1d(nn.Module):
    def __init__(self, in_channels, out_channels, dilation):
        super().__init__()
        self.pad = (KERNEL - 1) * dilation
        self.conv = weight_norm(conv1d(in_channels, out_channels, KERNEL, dilation=dilation))

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class ResidualConv1dGLU(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv = CausalConv1d(RES, 2 * RES, dilation)
        self.conv1x1g = conv1d(SPEAKER_DIM, 2 * RES, 1, bias=False)
        self.conv1x1_out = conv1d(RES, RES, 1)
        self.conv1x1_skip = conv1d(RES, SKIP, 1)

    def forward(self, x, g):
        h = self.conv(x) + self.conv1x1g(g)
        a, b = h.chunk(2, dim=1)
        z = torch.tanh(a) * torch.sigmoid(b)
        s = self.conv1x1_skip(z)
        return (x + self.conv1x1_out(z)) * math.sqrt(0.5), s


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_speakers = nn.Embedding(SPEAKERS, SPEAKER_DIM)
        self.first_conv = nn.Conv1d(LEVELS, RES, 1)
        nn.init.normal_(self.first_conv.weight)
        self.conv_layers = nn.ModuleList(ResidualConv1dGLU(d) for d in DILATIONS)
        self.last_conv_layers = nn.Sequential(
            nn.ReLU(), conv1d(SKIP, SKIP, 1), nn.ReLU(), conv1d(SKIP, LEVELS, 1)
        )

    def forward(self, codes, speaker):
        g = self.embed_speakers(speaker).unsqueeze(-1)
        x = self.first_conv(F.one_hot(codes, LEVELS).float().transpose(1, 2))
        skips = 0
        for layer in self.conv_layers:
            x, s = layer(x, g)
            skips = skips + s
        skips = skips * math.sqrt(1.0 / len(self.conv_layers))
        return self.last_conv_layers(skips)


def mulaw_quantize(x):
    mu = LEVELS - 1
    y = torch.sign(x) * torch.log1p(mu * x.abs()) / math.log1p(mu)
    return ((y + 1) / 2 * mu + 0.5).long()


# ---------------------------------------------------------------- JAX


class WNConv(eqx.Module):
    direction: jax.Array
    gain: jax.Array
    bias: jax.Array
    dilation: int = eqx.field(static=True)

    def __init__(self, cin, cout, dilation, *, key):
        self.direction = jax.random.normal(key, (KERNEL, cin, cout)) * np.sqrt(2.0 / (KERNEL * cin))
        self.gain = jnp.sqrt(jnp.sum(self.direction**2, axis=(0, 1)))
        self.bias = jnp.zeros(cout)
        self.dilation = dilation

    def kernel(self):
        norm = jnp.sqrt(jnp.sum(self.direction**2, axis=(0, 1), keepdims=True))
        return self.direction * (self.gain / norm)

    def __call__(self, x):
        """x: (time, channels)"""
        past = (KERNEL - 1) * self.dilation
        y = jax.lax.conv_general_dilated(
            x[None],
            self.kernel(),
            window_strides=(1,),
            padding=[(past, 0)],
            rhs_dilation=(self.dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        return y[0] + self.bias


class GatedUnit(eqx.Module):
    dilated: WNConv
    condition: eqx.nn.Linear
    residual: eqx.nn.Linear
    skip: eqx.nn.Linear

    def __init__(self, dilation, *, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.dilated = WNConv(RES, 2 * RES, dilation, key=k1)
        self.condition = eqx.nn.Linear(SPEAKER_DIM, 2 * RES, use_bias=False, key=k2)
        self.residual = eqx.nn.Linear(RES, RES, key=k3)
        self.skip = eqx.nn.Linear(RES, SKIP, key=k4)

    def __call__(self, x, speaker):
        pre = self.dilated(x) + self.condition(speaker)
        filt, gate = jnp.split(pre, 2, axis=-1)
        gated = jnp.tanh(filt) * jax.nn.sigmoid(gate)
        out = (x + jax.vmap(self.residual)(gated)) / np.sqrt(2.0)
        return out, jax.vmap(self.skip)(gated)


class Vocoder(eqx.Module):
    speakers: jax.Array
    front: jax.Array
    front_bias: jax.Array
    units: list
    post1: eqx.nn.Linear
    post2: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jax.random.split(key, len(DILATIONS) + 4)
        self.speakers = jax.random.normal(keys[0], (SPEAKERS, SPEAKER_DIM))
        self.front = jax.random.normal(keys[1], (LEVELS, RES))
        self.front_bias = jnp.zeros(RES)
        self.post1 = eqx.nn.Linear(SKIP, SKIP, key=keys[2])
        self.post2 = eqx.nn.Linear(SKIP, LEVELS, key=keys[3])
        self.units = [GatedUnit(d, key=k) for d, k in zip(DILATIONS, keys[4:])]

    def __call__(self, codes, speaker):
        x = self.front[codes] + self.front_bias
        vector = self.speakers[speaker]
        skips = []
        for unit in self.units:
            x, skip = unit(x, vector)
            skips.append(skip)
        total = jnp.stack(skips).sum(0) / np.sqrt(len(skips))
        hidden = jax.nn.relu(jax.vmap(self.post1)(jax.nn.relu(total)))
        return jax.vmap(self.post2)(hidden)


def encode(wave):
    mu = LEVELS - 1
    compressed = jnp.sign(wave) * jnp.log1p(mu * jnp.abs(wave)) / np.log1p(mu)
    return jnp.floor(0.5 * mu * (compressed + 1.0) + 0.5).astype(jnp.int32)


def clip_gradients(max_norm):
    def update(grads, state, params=None):
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = WaveNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)

    def clip(opt, args, kwargs):
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip)

    def loss_fn(wave, speaker):
        codes = mulaw_quantize(wave)
        y_hat = model(codes[:, :-1], speaker)
        return F.cross_entropy(y_hat, codes[:, 1:])

    wave, speaker = make_batch()
    return stablenum_torch.program(
        loss_fn, torch.tensor(wave), torch.tensor(speaker).long(), model=model, optimizer=optimizer
    )


def right():
    model = Vocoder(key=jax.random.key(6))

    def loss_fn(model, wave, speaker):
        codes = encode(wave)
        logits = jax.vmap(model)(codes[:, :-1], speaker)
        log_probs = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(log_probs, codes[:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    optimizer = optax.chain(clip_gradients(MAX_NORM), optax.sgd(LR, momentum=MOMENTUM, nesterov=True))
    return stablenum_jax.program(loss_fn, model, *map(jnp.asarray, make_batch()), optimizer=optimizer)
