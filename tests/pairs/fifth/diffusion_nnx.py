"""A tiny diffusion U-Net with self-conditioning and v-prediction: PyTorch original, flax.nnx port (NHWC)."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import stablenum_jax
import stablenum_torch

CH, TDIM, GROUPS, STEPS = 16, 32, 4, 1000


def make_batch():
    rng = np.random.default_rng(8)
    x0 = rng.normal(size=(4, 3, 8, 8)).astype(np.float32) * 0.5
    noise = rng.normal(size=(4, 3, 8, 8)).astype(np.float32)
    t = np.array([12, 260, 555, 930], dtype=np.int64)
    return x0, noise, t


# ---------------------------------------------------------------- PyTorch

def timestep_embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(TDIM, cout)
        self.norm2 = nn.GroupNorm(GROUPS, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.emb(F.silu(temb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(CH, TDIM), nn.SiLU(), nn.Linear(TDIM, TDIM))
        self.conv_in = nn.Conv2d(6, CH, 3, padding=1)
        self.down = ResBlock(CH, CH)
        self.mid = ResBlock(CH, 2 * CH)
        self.up = ResBlock(3 * CH, CH)
        self.norm_out = nn.GroupNorm(GROUPS, CH)
        self.conv_out = nn.Conv2d(CH, 3, 3, padding=1)

    def forward(self, x, cond, t):
        temb = self.time_mlp(timestep_embedding(t, CH))
        x = self.conv_in(torch.cat([cond, x], dim=1))
        skip = self.down(x, temb)
        h = F.avg_pool2d(skip, 2)
        h = self.mid(h, temb)
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = self.up(torch.cat([h, skip], dim=1), temb)
        return self.conv_out(F.silu(self.norm_out(h)))


class VDiffusion(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x0, noise, t):
        phase = (t + 0.5) / STEPS * math.pi / 2
        alpha = torch.cos(phase)[:, None, None, None]
        sigma = torch.sin(phase)[:, None, None, None]
        x_t = alpha * x0 + sigma * noise
        with torch.no_grad():
            v_first = self.net(x_t, torch.zeros_like(x_t), t)
            x0_first = alpha * x_t - sigma * v_first
        v_pred = self.net(x_t, x0_first, t)
        v_true = alpha * noise - sigma * x0
        snr = (alpha / sigma).square().flatten()
        weight = snr.clamp(max=5.0) / (snr + 1)
        per_image = (v_pred - v_true).square().mean(dim=(1, 2, 3))
        return (weight * per_image).mean()


def left():
    torch.manual_seed(0)
    model = VDiffusion(UNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=5e-2)
    x0, noise, t = make_batch()

    def loss_fn(x0, noise, t):
        return model(x0, noise, t)

    return stablenum_torch.program(loss_fn, torch.tensor(x0), torch.tensor(noise), torch.tensor(t),
                                   model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (nnx)

def sinusoids(steps, width):
    rates = 10000.0 ** (-jnp.arange(width // 2) / (width // 2))
    angles = steps[:, None] * rates
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def group_norm(channels, rngs):
    return nnx.GroupNorm(channels, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)


def conv3(cin, cout, rngs):
    return nnx.Conv(cin, cout, kernel_size=(3, 3), padding="SAME", rngs=rngs)


class Residual(nnx.Module):
    def __init__(self, cin, cout, *, rngs):
        self.gn_in = group_norm(cin, rngs)
        self.conv_a = conv3(cin, cout, rngs)
        self.time_proj = nnx.Linear(TDIM, cout, rngs=rngs)
        self.gn_mid = group_norm(cout, rngs)
        self.conv_b = conv3(cout, cout, rngs)
        self.shortcut = None if cin == cout else nnx.Linear(cin, cout, rngs=rngs)

    def __call__(self, feats, cond):
        h = self.conv_a(jax.nn.silu(self.gn_in(feats)))
        h = h + self.time_proj(cond)[:, None, None, :]
        h = self.conv_b(jax.nn.silu(self.gn_mid(h)))
        if self.shortcut is not None:
            feats = self.shortcut(feats)
        return feats + h


class Denoiser(nnx.Module):
    def __init__(self, *, rngs):
        self.time_in = nnx.Linear(CH, TDIM, rngs=rngs)
        self.time_out = nnx.Linear(TDIM, TDIM, rngs=rngs)
        self.first = conv3(6, CH, rngs)
        self.enc = Residual(CH, CH, rngs=rngs)
        self.bottom = Residual(CH, 2 * CH, rngs=rngs)
        self.dec = Residual(3 * CH, CH, rngs=rngs)
        self.gn_last = group_norm(CH, rngs)
        self.last = conv3(CH, 3, rngs)

    def __call__(self, noisy, guess, steps):
        time = self.time_out(jax.nn.silu(self.time_in(sinusoids(steps, CH))))
        time = jax.nn.silu(time)
        kept = self.enc(self.first(jnp.concatenate([guess, noisy], axis=-1)), time)
        b, rows, cols, c = kept.shape
        low = kept.reshape(b, rows // 2, 2, cols // 2, 2, c).mean(axis=(2, 4))
        low = self.bottom(low, time)
        high = jax.image.resize(low, (b, rows, cols, 2 * c), method="nearest")
        merged = self.dec(jnp.concatenate([high, kept], axis=-1), time)
        return self.last(jax.nn.silu(self.gn_last(merged)))


def diffusion_loss(net, clean, noise, steps):
    clean, noise = (jnp.transpose(a, (0, 2, 3, 1)) for a in (clean, noise))
    angle = (steps + 0.5) * (0.5 * jnp.pi / STEPS)
    a = jnp.cos(angle).reshape(-1, 1, 1, 1)
    s = jnp.sin(angle).reshape(-1, 1, 1, 1)
    noisy = a * clean + s * noise
    guess = a * noisy - s * net(noisy, jnp.zeros_like(noisy), steps)
    guess = jax.lax.stop_gradient(guess)
    velocity = net(noisy, guess, steps)
    error = jnp.square(velocity - (a * noise - s * clean))
    snr = jnp.square(a / s)
    factor = jnp.minimum(snr, 5.0) / (snr + 1.0)
    return jnp.mean(factor * error)


def right():
    net = Denoiser(rngs=nnx.Rngs(0))
    clean, noise, steps = make_batch()
    tx = optax.chain(optax.add_decayed_weights(5e-2), optax.adam(2e-3, b1=0.9, b2=0.99))
    return stablenum_jax.program(diffusion_loss, net, clean, noise, steps, optimizer=tx)
