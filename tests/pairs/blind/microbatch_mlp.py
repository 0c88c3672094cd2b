"""Tabular classifier trained with gradient accumulation.

The PyTorch loop sums scaled micro-batch losses; the Flax port maps over the micro-batches with vmap.
"""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

BATCH, ACCUM, N_FEATURES, N_CLASSES = 8, 4, 14, 6
HIDDEN = (32, 20)
FOCAL_GAMMA = 2.0
LOSS_SCALE = 256.0


def data():
    generator = np.random.Generator(np.random.PCG64(77))
    x = generator.standard_normal((BATCH, N_FEATURES), dtype=np.float32)
    x[:, ::3] *= 3.0
    y = generator.integers(0, N_CLASSES, size=BATCH)
    return x, y


class Stage(torch.nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.linear = torch.nn.Linear(n_in, n_out)
        self.norm = torch.nn.LayerNorm(n_out, eps=1e-6)
        self.residual = torch.nn.Linear(n_in, n_out, bias=False)

    def forward(self, x):
        return F.silu(self.norm(self.linear(x))) + self.residual(x)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (N_FEATURES, *HIDDEN)
        self.rms = torch.nn.RMSNorm(N_FEATURES, eps=1e-5)
        self.stages = torch.nn.Sequential(*[Stage(a, b) for a, b in zip(sizes[:-1], sizes[1:])])
        self.out = torch.nn.Linear(HIDDEN[-1], N_CLASSES)

    def forward(self, x):
        return self.out(self.stages(self.rms(x)))


def focal_loss(logits, labels):
    ce = F.cross_entropy(logits, labels, reduction="none")
    p_true = torch.exp(-ce)
    return ((1 - p_true) ** FOCAL_GAMMA * ce).mean()


class ScaledSGD(torch.optim.SGD):
    """SGD for a loss that was multiplied by `loss_scale`."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(LOSS_SCALE)
        return super().step(closure)


def left():
    torch.manual_seed(1234)
    model = Classifier()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "rms" in name:
                p.add_(0.15 * torch.randn_like(p))

    def loss_fn(x, y):
        total = torch.zeros((), dtype=x.dtype)
        for xb, yb in zip(x.chunk(ACCUM), y.chunk(ACCUM)):
            total = total + focal_loss(model(xb), yb) / ACCUM
        return total * LOSS_SCALE

    x, y = map(torch.from_numpy, data())
    return stablenum_torch.program(loss_fn, x, y, model=model, optimizer=ScaledSGD(model.parameters(), lr=0.2))


def bias_noise(key, shape, dtype=jnp.float32):
    return 0.15 * jax.random.normal(key, shape, dtype)


def scale_noise(key, shape, dtype=jnp.float32):
    return 1.0 + bias_noise(key, shape, dtype)


class FlaxStage(nn.Module):
    width: int

    def setup(self):
        self.linear = nn.Dense(self.width, bias_init=bias_noise)
        self.norm = nn.LayerNorm(scale_init=scale_noise, bias_init=bias_noise)
        self.residual = nn.Dense(self.width, use_bias=False)

    def __call__(self, x):
        h = self.norm(self.linear(x))
        return h * nn.sigmoid(h) + self.residual(x)


class FlaxClassifier(nn.Module):
    def setup(self):
        self.rms = nn.RMSNorm(epsilon=1e-5, scale_init=scale_noise)
        self.stages = [FlaxStage(width) for width in HIDDEN]
        self.out = nn.Dense(N_CLASSES, bias_init=bias_noise)

    def __call__(self, x):
        x = self.rms(x)
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


def micro_loss(params, x, y):
    logits = FlaxClassifier().apply(params, x)
    log_p = jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(y, N_CLASSES), axis=-1)
    return -jnp.mean((1.0 - jnp.exp(log_p)) ** FOCAL_GAMMA * log_p)


def accumulated_loss(params, x, y):
    xs = x.reshape(ACCUM, -1, x.shape[-1])
    ys = y.reshape(ACCUM, -1)
    losses = jax.vmap(micro_loss, in_axes=(None, 0, 0))(params, xs, ys)
    return LOSS_SCALE * jnp.mean(losses)


def right():
    x, y = map(jnp.asarray, data())
    params = FlaxClassifier().init(jax.random.key(321), x)
    optimizer = optax.chain(optax.scale(1.0 / LOSS_SCALE), optax.sgd(learning_rate=0.2))
    return stablenum_jax.program(accumulated_loss, params, x, y, optimizer=optimizer)
