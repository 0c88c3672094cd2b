"""Normalising flow on vectors (ActNorm, invertible linear, affine coupling), trained with NAdam.

PyTorch: a list of flow steps, one output projection in the coupling.  JAX: flax.linen, nn.scan over
the steps with stacked parameters, two output projections, NAdam as a gradient transformation.
"""
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

DIM, HALF, HIDDEN, DEPTH = 8, 4, 16, 3
MIN_SCALE = 0.88


def make_batch():
    rng = np.random.default_rng(5)
    basis = rng.normal(size=(DIM, DIM)) * 0.5
    x = rng.normal(size=(8, DIM)) @ basis + 0.3
    return x.astype(np.float32)


# ----------------------------------------------------------------------------- PyTorch


class LowerBoundFunction(torch.autograd.Function):
    """max(x, bound) whose gradient still pulls clipped values back above the bound (as in CompressAI)."""

    @staticmethod
    def forward(ctx, x, bound):
        ctx.save_for_backward(x)
        ctx.bound = bound
        return torch.clamp(x, min=bound)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        pass_through = (x >= ctx.bound) | (grad_output < 0)
        return pass_through.to(grad_output.dtype) * grad_output, None


class ActNorm(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bias = torch.nn.Parameter(0.1 * torch.randn(dim))
        self.log_scale = torch.nn.Parameter(0.1 * torch.randn(dim))

    def forward(self, x):
        y = (x + self.bias) * torch.exp(self.log_scale)
        return y, self.log_scale.sum()


class InvertibleLinear(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        q, _ = torch.linalg.qr(torch.randn(dim, dim))
        self.weight = torch.nn.Parameter(q + 0.05 * torch.randn(dim, dim))

    def forward(self, x):
        return F.linear(x, self.weight), torch.linalg.slogdet(self.weight)[1]


class AffineCoupling(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = torch.nn.Linear(dim // 2, hidden)
        self.norm = torch.nn.LayerNorm(hidden, eps=1e-3)
        self.fc2 = torch.nn.Linear(hidden, hidden)
        self.out = torch.nn.Linear(hidden, dim)

    def forward(self, x):
        xa, xb = x.chunk(2, dim=-1)
        h = F.silu(self.norm(self.fc1(xa)))
        h = F.silu(self.fc2(h))
        shift, raw = self.out(h).chunk(2, dim=-1)
        scale = LowerBoundFunction.apply(torch.sigmoid(raw + 2.0), MIN_SCALE)
        yb = (xb + shift) * scale
        return torch.cat([xa, yb], dim=-1), torch.log(scale).sum(dim=-1)


class FlowStep(torch.nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.actnorm = ActNorm(dim)
        self.mix = InvertibleLinear(dim)
        self.coupling = AffineCoupling(dim, hidden)

    def forward(self, x, logdet):
        for layer in (self.actnorm, self.mix, self.coupling):
            x, delta = layer(x)
            logdet = logdet + delta
        return x, logdet


class Flow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.nn.ModuleList([FlowStep(DIM, HIDDEN) for _ in range(DEPTH)])

    def log_prob(self, x):
        logdet = x.new_zeros(x.shape[0])
        for step in self.steps:
            x, logdet = step(x, logdet)
        log_pz = -0.5 * (x ** 2 + math.log(2 * math.pi))
        return log_pz.sum(dim=-1) + logdet


# ----------------------------------------------------------------------------- JAX / flax.linen


@jax.custom_vjp
def lower_bound(x, bound):
    return jnp.maximum(x, bound)


def _lower_bound_fwd(x, bound):
    return jnp.maximum(x, bound), (x, bound)


def _lower_bound_bwd(res, g):
    x, bound = res
    keep = jnp.logical_or(x >= bound, g < 0)
    return jnp.where(keep, g, 0.0), None


lower_bound.defvjp(_lower_bound_fwd, _lower_bound_bwd)


class Conditioner(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(HIDDEN, name="fc1")(x)
        h = nn.LayerNorm(epsilon=1e-3, name="norm")(h)
        h = nn.Dense(HIDDEN, name="fc2")(nn.silu(h))
        h = nn.silu(h)
        return nn.Dense(HALF, name="out_shift")(h), nn.Dense(HALF, name="out_scale")(h)


class GlowStep(nn.Module):
    """One step, written for nn.scan: carry in, carry out."""

    def setup(self):
        self.bias = self.param("actnorm_bias", nn.initializers.normal(0.1), (DIM,))
        self.log_scale = self.param("actnorm_log_scale", nn.initializers.normal(0.1), (DIM,))
        self.mix = self.param("mix_weight", nn.initializers.orthogonal(), (DIM, DIM))
        self.coupling = Conditioner()

    def __call__(self, carry, _):
        z, total = carry
        z = jnp.exp(self.log_scale) * (z + self.bias)
        z = jnp.einsum("oi,bi->bo", self.mix, z)
        keep, change = z[:, :HALF], z[:, HALF:]
        shift, raw = self.coupling(keep)
        scale = lower_bound(nn.sigmoid(raw + 2.0), MIN_SCALE)
        z = jnp.concatenate([keep, scale * (change + shift)], axis=1)
        _, logabsdet = jnp.linalg.slogdet(self.mix)
        total = total + jnp.sum(jnp.log(scale), axis=1) + jnp.sum(self.log_scale) + logabsdet
        return (z, total), None


class GlowFlow(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            GlowStep, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH
        )
        (z, logdet), _ = scanned(name="steps")((x, jnp.zeros(x.shape[0], x.dtype)), None)
        prior = -0.5 * jnp.sum(z * z, axis=1) - 0.5 * DIM * np.log(2 * np.pi)
        return prior + logdet


class NadamState(NamedTuple):
    count: jax.Array
    mu_product: jax.Array
    m: optax.Updates
    v: optax.Updates


def scale_by_torch_nadam(b1=0.9, b2=0.999, eps=1e-8, momentum_decay=4e-3):
    """torch.optim.NAdam: momentum follows b1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))."""

    def init_fn(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return NadamState(jnp.zeros([], jnp.int32), jnp.ones([]), zeros, zeros)

    def update_fn(grads, state, params=None):
        t = state.count + 1
        mu = b1 * (1.0 - 0.5 * 0.96 ** (t * momentum_decay))
        mu_next = b1 * (1.0 - 0.5 * 0.96 ** ((t + 1) * momentum_decay))
        product = state.mu_product * mu
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.v, grads)
        from_grad = (1.0 - mu) / (1.0 - product)
        from_m = mu_next / (1.0 - product * mu_next)
        correction = 1.0 - b2 ** t

        def direction(g, m, v):
            return (from_grad * g + from_m * m) / (jnp.sqrt(v / correction) + eps)

        return jax.tree.map(direction, grads, m, v), NadamState(t, product, m, v)

    return optax.GradientTransformation(init_fn, update_fn)


# ----------------------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Flow()
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-8, momentum_decay=4e-3)
    x = make_batch()

    def loss_fn(x):
        nll = -model.log_prob(x)
        return nll.mean() / (DIM * math.log(2.0))

    return stablenum_torch.program(loss_fn, torch.tensor(x), model=model, optimizer=optimizer)


def right():
    flow = GlowFlow()
    x = jnp.asarray(make_batch())
    params = flow.init(jax.random.PRNGKey(0), x)["params"]

    def loss_fn(params, x):
        log_likelihood = flow.apply({"params": params}, x)
        bits = -log_likelihood / np.log(2.0) / DIM
        return jnp.mean(bits)

    optimizer = optax.chain(scale_by_torch_nadam(b1=0.9, b2=0.999, eps=1e-8), optax.scale(-2e-3))
    return stablenum_jax.program(loss_fn, params, x, optimizer=optimizer)
