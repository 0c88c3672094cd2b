"""Conditional neural spline flow with a mixture as base: nflows and torch.distributions against distrax with
conditioners in equinox."""

import math

import distrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from nflows.nn.nets import ResidualNet
from nflows.transforms import ActNorm, CompositeTransform, PiecewiseRationalQuadraticCouplingTransform
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

import stablenum_jax
import stablenum_torch

FEATURES, SPLIT, CONTEXT, EMBEDDED = 5, 2, 3, 4
LAYERS, HIDDEN, BLOCKS, BINS, BOUND = 3, 12, 2, 4, 3.0
MIN_BIN = MIN_SLOPE = 1e-3
COMPONENTS = 3
LR, BASE_LR, ALPHA, EPS, MOMENTUM, DECAY, WARMUP = 2e-3, 1e-2, 0.95, 1e-6, 0.9, 1e-2, 10


def make_batch():
    rng = np.random.default_rng(8)
    context = rng.normal(size=(6, CONTEXT))
    data = 0.8 * rng.normal(size=(6, FEATURES)) + 0.4 * context[:, :1]
    data[0, 1], data[3, 4] = 3.9, -4.2
    weight = rng.uniform(0.2, 2.0, size=6)
    return [a.astype(np.float32) for a in (data, context, weight)]


# ---------------------------------------------------------------- PyTorch


class MixtureBase(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc = nn.Parameter(torch.randn(COMPONENTS, FEATURES))
        self.log_scale = nn.Parameter(0.2 * torch.randn(COMPONENTS, FEATURES))
        self.logits = nn.Linear(EMBEDDED, COMPONENTS)

    def log_prob(self, noise, embedded):
        shares = Categorical(logits=self.logits(embedded.detach()))
        components = Independent(Normal(self.loc, self.log_scale.exp()), 1)
        components = components.expand((len(noise), COMPONENTS))
        return MixtureSameFamily(shares, components).log_prob(noise)


class SplineFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(CONTEXT, 8), nn.SiLU(), nn.Linear(8, EMBEDDED))
        steps = []
        for i in range(LAYERS):
            mask = torch.ones(FEATURES)
            mask[:SPLIT] = 0
            steps.append(ActNorm(FEATURES))
            steps.append(
                PiecewiseRationalQuadraticCouplingTransform(
                    mask if i % 2 == 0 else 1 - mask,
                    lambda n_in, n_out: ResidualNet(
                        n_in, n_out, HIDDEN, context_features=EMBEDDED, num_blocks=BLOCKS, activation=F.elu
                    ),
                    num_bins=BINS,
                    tails="linear",
                    tail_bound=BOUND,
                    min_bin_width=MIN_BIN,
                    min_bin_height=MIN_BIN,
                    min_derivative=MIN_SLOPE,
                )
            )
        self.transform = CompositeTransform(steps)
        self.base = MixtureBase()

    def log_prob(self, data, context):
        embedded = self.encoder(context)
        noise, logabsdet = self.transform(data, embedded)
        return self.base.log_prob(noise, embedded) + logabsdet


def make_rmsprop(model):
    base = list(model.base.parameters())
    rest = list(model.encoder.parameters()) + list(model.transform.parameters())
    optimizer = torch.optim.RMSprop(
        [{"params": rest, "weight_decay": DECAY}, {"params": base, "lr": BASE_LR}],
        lr=LR,
        alpha=ALPHA,
        eps=EPS,
        momentum=MOMENTUM,
        centered=True,
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=WARMUP)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


class GatedBlock(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    gate: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.first = eqx.nn.Linear(HIDDEN, HIDDEN, key=a)
        self.second = eqx.nn.Linear(HIDDEN, HIDDEN, key=b)
        self.gate = eqx.nn.Linear(EMBEDDED, HIDDEN, key=c)

    def __call__(self, h, condition):
        update = self.second(jax.nn.elu(self.first(jax.nn.elu(h))))
        return h + update * jax.nn.sigmoid(self.gate(condition))


class Conditioner(eqx.Module):
    enter: eqx.nn.Linear
    blocks: list
    leave: eqx.nn.Linear
    n_out: int = eqx.field(static=True)

    def __init__(self, n_in, n_out, key):
        a, b, *rest = jax.random.split(key, 2 + BLOCKS)
        self.n_out = n_out
        self.enter = eqx.nn.Linear(n_in + EMBEDDED, HIDDEN, key=a)
        self.leave = eqx.nn.Linear(HIDDEN, n_out * (3 * BINS - 1), key=b)
        self.blocks = [GatedBlock(k) for k in rest]

    def __call__(self, kept, condition):
        h = self.enter(jnp.concatenate([kept, condition]))
        for block in self.blocks:
            h = block(h, condition)
        raw = self.leave(h).reshape(self.n_out, -1)
        bins, slopes = raw[:, : 2 * BINS] / HIDDEN**0.5, raw[:, 2 * BINS :]
        # distrax adds this offset before its softplus, nflows does not
        slopes = slopes - math.log(math.exp(1 - MIN_SLOPE) - 1)
        return jnp.concatenate([bins, jnp.pad(slopes, ((0, 0), (1, 1)))], axis=-1)


def spline(params):
    return distrax.RationalQuadraticSpline(
        params,
        range_min=-BOUND,
        range_max=BOUND,
        boundary_slopes="identity",
        min_bin_size=MIN_BIN * 2 * BOUND,
        min_knot_slope=MIN_SLOPE,
    )


class Density(eqx.Module):
    embed: eqx.nn.MLP
    log_gain: list
    bias: list
    conditioners: list
    mean: jax.Array
    log_std: jax.Array
    share: eqx.nn.Linear

    def __init__(self, key):
        a, b, c, d, *rest = jax.random.split(key, 4 + LAYERS)
        self.embed = eqx.nn.MLP(CONTEXT, EMBEDDED, 8, 1, activation=jax.nn.silu, key=a)
        self.log_gain = [jnp.zeros(FEATURES) for _ in rest]
        self.bias = [jnp.zeros(FEATURES) for _ in rest]
        sizes = [(SPLIT, FEATURES - SPLIT), (FEATURES - SPLIT, SPLIT)]
        self.conditioners = [Conditioner(*sizes[i % 2], k) for i, k in enumerate(rest)]
        self.mean = jax.random.normal(b, (COMPONENTS, FEATURES))
        self.log_std = 0.2 * jax.random.normal(c, (COMPONENTS, FEATURES))
        self.share = eqx.nn.Linear(EMBEDDED, COMPONENTS, key=d)

    def bijector(self, condition):
        steps = []
        for i, conditioner in enumerate(self.conditioners):
            affine = distrax.ScalarAffine(shift=self.bias[i], log_scale=self.log_gain[i])
            steps.append(distrax.Block(affine, 1))
            steps.append(
                distrax.SplitCoupling(
                    SPLIT,
                    event_ndims=1,
                    conditioner=lambda kept, net=conditioner: net(kept, condition),
                    bijector=spline,
                    swap=i % 2 == 1,
                )
            )
        return distrax.Chain(steps[::-1])

    def __call__(self, row, context):
        condition = self.embed(context)
        z, log_det = self.bijector(condition).forward_and_log_det(row)
        logits = self.share(jax.lax.stop_gradient(condition))
        parts = distrax.MultivariateNormalDiag(self.mean, jnp.exp(self.log_std)).log_prob(z)
        return jax.nn.logsumexp(jax.nn.log_softmax(logits) + parts) + log_det


def make_optimizer():
    def rmsprop(peak, decay):
        rate = optax.linear_schedule(0.25 * peak, peak, WARMUP)
        return optax.chain(
            optax.add_decayed_weights(decay),
            optax.rmsprop(rate, decay=ALPHA, eps=EPS, eps_in_sqrt=False, centered=True, momentum=MOMENTUM),
        )

    def label(path, _):
        return "base" if path[0].name in ("mean", "log_std", "share") else "flow"

    return optax.multi_transform(
        {"flow": rmsprop(LR, DECAY), "base": rmsprop(BASE_LR, 0.0)},
        lambda params: jax.tree_util.tree_map_with_path(label, params),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = SplineFlow()
    with torch.no_grad():
        for p in model.transform.parameters():
            p.add_(0.2 * torch.randn_like(p))
    model.eval()

    def loss_fn(data, context, weight):
        nll = -model.log_prob(data, context)
        return (weight * nll).sum() / weight.sum()

    batch = (torch.from_numpy(a) for a in make_batch())
    return stablenum_torch.program(loss_fn, *batch, model=model, optimizer=make_rmsprop(model))


def right():
    params, static = eqx.partition(Density(jax.random.key(2)), eqx.is_inexact_array)

    def loss_fn(params, data, context, weight):
        density = eqx.combine(params, static)
        return -jnp.average(jax.vmap(density)(data, context), weights=weight)

    batch = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(loss_fn, params, *batch, optimizer=make_optimizer())
