"""NeRF with coarse and fine networks: rays in batches in PyTorch, one ray at a time under vmap in equinox."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

RAYS, COARSE, FINE, WIDTH = 10, 8, 6, 24
POINT_BANDS, VIEW_BANDS = 4, 2
POINT_DIM, VIEW_DIM = 3 + 6 * POINT_BANDS, 3 + 6 * VIEW_BANDS
NEAR, FAR = 2.0, 6.0
LR_INIT, LR_FINAL, LR_STEPS, DELAY_STEPS, DELAY_MULT = 5e-3, 5e-5, 1000, 20, 0.1


def make_batch():
    rng = np.random.default_rng(40)
    origins = np.array([0.0, 0.0, 4.0]) + 0.1 * rng.normal(size=(RAYS, 3))
    pixels = rng.uniform(-0.5, 0.5, (RAYS, 2))
    directions = np.concatenate([pixels, -np.ones((RAYS, 1))], axis=1)
    jitter = rng.random((RAYS, COARSE))
    colors = rng.random((RAYS, 3))
    return [a.astype(np.float32) for a in (origins, directions, jitter, colors)]


# ---------------------------------------------------------------- PyTorch


class Embedder(nn.Module):
    def __init__(self, bands):
        super().__init__()
        self.freqs = [2.0**k for k in range(bands)]

    def forward(self, x):
        parts = [x]
        for freq in self.freqs:
            parts += [torch.sin(freq * x), torch.cos(freq * x)]
        return torch.cat(parts, dim=-1)


class NeRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_points = Embedder(POINT_BANDS)
        self.embed_views = Embedder(VIEW_BANDS)
        self.pts_linears = nn.ModuleList(
            [nn.Linear(POINT_DIM, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH + POINT_DIM, WIDTH)]
        )
        self.sigma_linear = nn.Linear(WIDTH, 1)
        self.feature_linear = nn.Linear(WIDTH, WIDTH)
        self.views_linear = nn.Linear(WIDTH + VIEW_DIM, WIDTH // 2)
        self.rgb_linear = nn.Linear(WIDTH // 2, 3)

    def forward(self, points, views):
        points = self.embed_points(points)
        views = self.embed_views(views)
        h = points
        for i, layer in enumerate(self.pts_linears):
            if i == 2:
                h = torch.cat([points, h], -1)
            h = F.relu(layer(h))
        sigma = F.softplus(self.sigma_linear(h) - 1.0).squeeze(-1)
        feature = self.feature_linear(h)
        views = views[:, None].expand(-1, h.size(1), -1)
        h = F.relu(self.views_linear(torch.cat([feature, views], -1)))
        return torch.sigmoid(self.rgb_linear(h)), sigma


def raw2outputs(rgb, sigma, z_vals, rays_d):
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.full_like(dists[..., :1], 1e10)], -1)
    dists = dists * torch.norm(rays_d, dim=-1, keepdim=True)
    alpha = 1.0 - torch.exp(-sigma * dists)
    ones = torch.ones_like(alpha[:, :1])
    transmittance = torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * transmittance
    rgb_map = torch.sum(weights[..., None] * rgb, -2)
    return rgb_map, weights


def sample_pdf(bins, weights, n):
    weights = weights + 1e-5
    pdf = weights / weights.sum(-1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = ((torch.arange(n) + 0.5) / n).expand(cdf.size(0), n).contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below = (inds - 1).clamp(min=0)
    above = inds.clamp(max=cdf.size(-1) - 1)
    cdf_lo, cdf_hi = cdf.gather(1, below), cdf.gather(1, above)
    bin_lo, bin_hi = bins.gather(1, below), bins.gather(1, above)
    t = (u - cdf_lo) / (cdf_hi - cdf_lo)
    return bin_lo + t * (bin_hi - bin_lo)


class Renderer(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = NeRF()
        self.fine = NeRF()

    def march(self, network, rays_o, rays_d, viewdirs, z_vals):
        pts = rays_o[:, None, :] + rays_d[:, None, :] * z_vals[:, :, None]
        rgb, sigma = network(pts, viewdirs)
        return raw2outputs(rgb, sigma, z_vals, rays_d)

    def forward(self, rays_o, rays_d, jitter):
        viewdirs = F.normalize(rays_d, dim=-1)
        z_vals = NEAR + (FAR - NEAR) * (torch.arange(COARSE) + jitter) / COARSE
        rgb0, weights = self.march(self.coarse, rays_o, rays_d, viewdirs, z_vals)
        z_mid = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        z_samples = sample_pdf(z_mid, weights[..., 1:-1].detach(), FINE)
        z_vals, _ = torch.sort(torch.cat([z_vals, z_samples], -1), -1)
        rgb, _ = self.march(self.fine, rays_o, rays_d, viewdirs, z_vals)
        return rgb, rgb0


def learning_rate_factor(step):
    delay = DELAY_MULT + (1 - DELAY_MULT) * math.sin(0.5 * math.pi * min(step / DELAY_STEPS, 1.0))
    return delay * (LR_FINAL / LR_INIT) ** min(step / LR_STEPS, 1.0)


# ---------------------------------------------------------------- JAX


def encode(x, bands):
    angles = x * (2.0 ** jnp.arange(bands))[:, None]
    waves = jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=1)
    return jnp.concatenate([x, waves.ravel()])


class Field(eqx.Module):
    layer0: eqx.nn.Linear
    layer1: eqx.nn.Linear
    layer2: eqx.nn.Linear
    density: eqx.nn.Linear
    bottleneck: eqx.nn.Linear
    view: eqx.nn.Linear
    color: eqx.nn.Linear

    def __init__(self, key):
        k = jax.random.split(key, 7)
        self.layer0 = eqx.nn.Linear(POINT_DIM, WIDTH, key=k[0])
        self.layer1 = eqx.nn.Linear(WIDTH, WIDTH, key=k[1])
        self.layer2 = eqx.nn.Linear(POINT_DIM + WIDTH, WIDTH, key=k[2])
        self.density = eqx.nn.Linear(WIDTH, "scalar", key=k[3])
        self.bottleneck = eqx.nn.Linear(WIDTH, WIDTH, key=k[4])
        self.view = eqx.nn.Linear(WIDTH + VIEW_DIM, WIDTH // 2, key=k[5])
        self.color = eqx.nn.Linear(WIDTH // 2, 3, key=k[6])

    def __call__(self, point, direction):
        x = encode(point, POINT_BANDS)
        h = jax.nn.relu(self.layer1(jax.nn.relu(self.layer0(x))))
        h = jax.nn.relu(self.layer2(jnp.concatenate([x, h])))
        sigma = jax.nn.softplus(self.density(h) - 1.0)
        y = jnp.concatenate([self.bottleneck(h), encode(direction, VIEW_BANDS)])
        return jax.nn.sigmoid(self.color(jax.nn.relu(self.view(y)))), sigma


def composite(field, origin, direction, depths):
    """The colour of one ray, and the weights of its samples."""
    norm = jnp.sqrt(jnp.sum(direction**2))
    points = origin + depths[:, None] * direction
    colors, sigma = jax.vmap(field, in_axes=(0, None))(points, direction / norm)
    delta = jnp.append(jnp.diff(depths), 1e10) * norm
    alpha = 1 - jnp.exp(-sigma * delta)
    survive = jnp.cumprod(1 - alpha + 1e-10)
    weights = alpha * jnp.concatenate([jnp.ones(1), survive[:-1]])
    return weights @ colors, weights


def resample(edges, weights, n):
    probability = (weights + 1e-5) / jnp.sum(weights + 1e-5)
    cdf = jnp.concatenate([jnp.zeros(1), jnp.cumsum(probability)])
    return jnp.interp((jnp.arange(n) + 0.5) / n, cdf, edges)


def render(networks, origin, direction, jitter):
    coarse, fine = networks
    step = (FAR - NEAR) / COARSE
    depths = NEAR + step * (jnp.arange(COARSE) + jitter)
    first, weights = composite(coarse, origin, direction, depths)
    edges = (depths[1:] + depths[:-1]) / 2
    extra = resample(edges, jax.lax.stop_gradient(weights[1:-1]), FINE)
    depths = jnp.sort(jnp.concatenate([depths, extra]))
    second, _ = composite(fine, origin, direction, depths)
    return first, second


def loss_fn(networks, origins, directions, jitter, colors):
    first, second = jax.vmap(render, in_axes=(None, 0, 0, 0))(networks, origins, directions, jitter)
    return jnp.mean((first - colors) ** 2) + jnp.mean((second - colors) ** 2)


def schedule(count):
    progress = jnp.clip(count / LR_STEPS, 0, 1)
    base = jnp.exp((1 - progress) * math.log(LR_INIT) + progress * math.log(LR_FINAL))
    ramp = jnp.sin(0.5 * jnp.pi * jnp.clip(count / DELAY_STEPS, 0, 1))
    return base * (DELAY_MULT + (1 - DELAY_MULT) * ramp)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Renderer()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR_INIT, eps=1e-7)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())

    def objective(rays_o, rays_d, jitter, target):
        rgb, rgb0 = model(rays_o, rays_d, jitter)
        return F.mse_loss(rgb, target) + F.mse_loss(rgb0, target)

    return stablenum_torch.program(
        objective, *map(torch.from_numpy, make_batch()), model=model, optimizer=optimizer
    )


def right():
    networks = tuple(Field(k) for k in jax.random.split(jax.random.key(11)))
    return stablenum_jax.program(
        loss_fn, networks, *map(jnp.asarray, make_batch()), optimizer=optax.adam(schedule, eps=1e-7)
    )
