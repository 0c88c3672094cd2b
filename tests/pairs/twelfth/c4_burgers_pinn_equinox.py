"""Physics-informed network for Burgers' equation with causal and self-adaptive weights: torch.autograd.grad against
jax.grad over an equinox module, NAdam with groups (one of them ascends) against optax.multi_transform."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

import stablenum_jax
import stablenum_torch

WIDTH, DEPTH, FREQUENCIES, SLOPE_FACTOR = 12, 2, 4, 10.0
NU, CHUNKS, PER_CHUNK, TOLERANCE = 0.05, 4, 4, 0.8
LR, SLOPE_LR, WEIGHT_LR, MOMENTUM_DECAY = 1e-3, 5e-3, 1e-2, 4e-3
FOURIER = np.random.default_rng(0).normal(size=(2, FREQUENCIES)).astype(np.float32) * 0.3


def make_batch():
    rng = np.random.default_rng(5)
    t = np.sort(rng.random(CHUNKS * PER_CHUNK))
    x = rng.uniform(-1, 1, CHUNKS * PER_CHUNK)
    x0 = np.linspace(-0.9, 0.8, 6)
    edge_t = rng.random(5)
    return [a.astype(np.float32) for a in (t, x, x0, -np.sin(np.pi * x0), edge_t)]


# ---------------------------------------------------------------- PyTorch


class FourierFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("B", torch.tensor(FOURIER, dtype=torch.get_default_dtype()))

    def forward(self, coords):
        proj = 2 * torch.pi * coords @ self.B
        return torch.cat([proj.sin(), proj.cos()], dim=-1)


class AdaptiveTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter((1.0 + 0.3 * torch.rand(())) / SLOPE_FACTOR)

    def forward(self, x):
        return torch.tanh(SLOPE_FACTOR * self.a * x)


class BurgersPINN(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [FourierFeatures()]
        width = 2 * FREQUENCIES
        for _ in range(DEPTH):
            layers += [nn.Linear(width, WIDTH), AdaptiveTanh()]
            width = WIDTH
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))
        self.ic_weight = nn.Parameter(0.5 + torch.rand(6))

    def forward(self, t, x):
        return self.net(torch.stack([t, x], dim=-1)).squeeze(-1)

    def residual(self, t, x):
        t = t.detach().requires_grad_(True)
        x = x.detach().requires_grad_(True)
        u = self(t, x)
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return u_t + u * u_x - NU * u_xx

    def loss(self, t, x, x0, u0, edge_t):
        chunk_loss = self.residual(t, x).pow(2).view(CHUNKS, PER_CHUNK).mean(1)
        before = torch.cumsum(chunk_loss, 0) - chunk_loss
        causal = torch.exp(-TOLERANCE * before).detach()
        loss_pde = (causal * chunk_loss).mean()
        loss_ic = (self.ic_weight.pow(2) * (self(torch.zeros_like(x0), x0) - u0).pow(2)).mean()
        one = torch.ones_like(edge_t)
        loss_bc = nn.functional.mse_loss(self(edge_t, -one), self(edge_t, one))
        return loss_pde + loss_ic + loss_bc


def make_nadam(model):
    slopes = [p for n, p in model.named_parameters() if n.endswith(".a")]
    rest = [p for n, p in model.net.named_parameters() if not n.endswith(".a")]
    optimizer = torch.optim.NAdam(
        [
            {"params": rest},
            {"params": slopes, "lr": SLOPE_LR},
            {"params": [model.ic_weight], "lr": WEIGHT_LR, "maximize": True},
        ],
        lr=LR,
        betas=(0.9, 0.99),
        momentum_decay=MOMENTUM_DECAY,
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


class Field(eqx.Module):
    hidden: list
    slopes: list
    out: eqx.nn.Linear

    def __init__(self, key):
        *keys, last = jax.random.split(key, DEPTH + 1)
        sizes = [2 * FREQUENCIES] + [WIDTH] * DEPTH
        self.hidden = [eqx.nn.Linear(n, m, key=k) for n, m, k in zip(sizes, sizes[1:], keys)]
        self.slopes = [jnp.array(1.0 / SLOPE_FACTOR) for _ in keys]
        self.out = eqx.nn.Linear(WIDTH, "scalar", key=last)

    def __call__(self, t, x):
        phases = 2.0 * jnp.pi * (jnp.array([t, x]) @ FOURIER)
        h = jnp.concatenate([jnp.sin(phases), jnp.cos(phases)])
        for layer, slope in zip(self.hidden, self.slopes):
            h = jnp.tanh(SLOPE_FACTOR * slope * layer(h))
        return self.out(h)


def burgers(field, t, x):
    u, (u_t, u_x) = jax.value_and_grad(field, argnums=(0, 1))(t, x)
    u_xx = jax.grad(jax.grad(field, argnums=1), argnums=1)(t, x)
    return u_t + u * u_x - NU * u_xx


def total_loss(params, t, x, x0, u0, edge_t):
    field, importance = params["field"], params["importance"]
    squares = jnp.square(jax.vmap(burgers, in_axes=(None, 0, 0))(field, t, x))
    chunks = squares.reshape(CHUNKS, PER_CHUNK).mean(axis=1)
    earlier = jnp.triu(jnp.ones((CHUNKS, CHUNKS)), k=1).T
    causal = jax.lax.stop_gradient(jnp.exp(-TOLERANCE * (earlier @ chunks)))
    start = jax.vmap(lambda x: field(0.0, x))(x0) - u0
    jump = jax.vmap(lambda t: field(t, -1.0) - field(t, 1.0))(edge_t)
    return jnp.mean(causal * chunks) + jnp.mean(jnp.square(importance * start)) + jnp.mean(jump**2)


class NadamState(NamedTuple):
    count: jax.Array
    product: jax.Array
    m: optax.Updates
    v: optax.Updates


def scale_by_nadam(b1, b2, eps, momentum_decay):
    """NAdam with the momentum schedule of the paper, which optax.nadam has not."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return NadamState(jnp.zeros([], jnp.int32), jnp.ones([]), zeros, zeros)

    def update(grads, state, params=None):
        count = state.count + 1
        now, following = (b1 * (1 - 0.5 * 0.96 ** (c * momentum_decay)) for c in (count, count + 1))
        product = state.product * now
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.v, grads)

        def direction(g, m, v):
            mean = g * (1 - now) / (1 - product) + m * following / (1 - product * following)
            return mean / (jnp.sqrt(v / (1 - b2**count)) + eps)

        return jax.tree.map(direction, grads, m, v), NadamState(count, product, m, v)

    return optax.GradientTransformation(init, update)


def make_optimizer():
    def nadam(rate):
        return optax.chain(
            scale_by_nadam(0.9, 0.99, 1e-8, MOMENTUM_DECAY),
            optax.scale_by_learning_rate(optax.exponential_decay(rate, 1, 0.98)),
        )

    def label(path, _):
        names = jax.tree_util.keystr(path)
        if "importance" in names:
            return "ascend"
        return "slope" if "slopes" in names else "weights"

    return optax.multi_transform(
        {
            "weights": nadam(LR),
            "slope": nadam(SLOPE_LR),
            "ascend": optax.chain(optax.scale(-1.0), nadam(WEIGHT_LR)),
        },
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = BurgersPINN()
    batch = (torch.from_numpy(a) for a in make_batch())
    return stablenum_torch.program(model.loss, *batch, model=model, optimizer=make_nadam(model))


def right():
    field, static = eqx.partition(Field(jax.random.key(1)), eqx.is_inexact_array)
    params = {"field": field, "importance": jnp.ones(6)}

    def loss_fn(params, *batch):
        merged = {**params, "field": eqx.combine(params["field"], static)}
        return total_loss(merged, *batch)

    batch = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(loss_fn, params, *batch, optimizer=make_optimizer())
