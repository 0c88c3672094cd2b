"""Small diffusion U-Net with FiLM time embeddings, self-conditioning and min-SNR weights.

PyTorch: NCHW, fused FiLM projection, legacy qkv order.  JAX: flax.nnx, NHWC, split FiLM projection.
"""
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

BASE, MID, EMB, GROUPS, HEADS = 8, 16, 32, 4, 2
STEPS = 100
BETAS = np.linspace(1e-3, 6e-2, STEPS)
ALPHA_BAR = np.cumprod(1.0 - BETAS).astype(np.float32)


def make_batch():
    rng = np.random.default_rng(11)
    x0 = np.clip(rng.normal(0.0, 0.5, (4, 3, 8, 8)), -1.0, 1.0).astype(np.float32)
    noise = rng.normal(size=x0.shape).astype(np.float32)
    t = np.array([3, 17, 42, 88], dtype=np.int32)
    return x0, noise, t


# ----------------------------------------------------------------------------- PyTorch


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, device=t.device) / half)
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, cin)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.emb = nn.Linear(EMB, 2 * cout)
        self.norm2 = nn.GroupNorm(GROUPS, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, dim=1)
        h = self.norm2(h) * (1 + scale) + shift
        h = self.conv2(F.silu(h))
        return self.skip(x) + h


class AttentionBlock(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(GROUPS, channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, height, width = x.shape
        tokens = self.norm(x).reshape(b, c, height * width)
        ch = c // self.heads
        qkv = self.qkv(tokens).reshape(b * self.heads, 3 * ch, height * width)
        q, k, v = qkv.split(ch, dim=1)
        s = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * s, k * s)
        weight = torch.softmax(weight, dim=-1)
        a = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, height * width)
        return x + self.proj(a).reshape(b, c, height, width)


class Downsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x):
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return self.conv(x)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time1 = nn.Linear(16, EMB)
        self.time2 = nn.Linear(EMB, EMB)
        self.conv_in = nn.Conv2d(6, BASE, 3, padding=1)
        self.res_down = ResBlock(BASE, BASE)
        self.down = Downsample(BASE)
        self.res_mid = ResBlock(BASE, MID)
        self.attn = AttentionBlock(MID, HEADS)
        self.up = Upsample(MID)
        self.res_up = ResBlock(MID + BASE, BASE)
        self.norm_out = nn.GroupNorm(GROUPS, BASE)
        self.conv_out = nn.Conv2d(BASE, 3, 3, padding=1)

    def forward(self, x, cond, t):
        emb = self.time2(F.silu(self.time1(timestep_embedding(t, 16))))
        h = self.conv_in(torch.cat([x, cond], dim=1))
        h = self.res_down(h, emb)
        skip = h
        h = self.res_mid(self.down(h), emb)
        h = self.attn(h)
        h = self.up(h)
        h = self.res_up(torch.cat([h, skip], dim=1), emb)
        return self.conv_out(F.silu(self.norm_out(h)))


def diffusion_loss(model, x0, noise, t):
    ab = torch.tensor(ALPHA_BAR)[t].to(x0.dtype)[:, None, None, None]
    x_t = ab.sqrt() * x0 + (1 - ab).sqrt() * noise
    with torch.no_grad():
        eps = model(x_t, torch.zeros_like(x_t), t)
        draft = ((x_t - (1 - ab).sqrt() * eps) / ab.sqrt()).clamp(-1, 1)
    pred = model(x_t, draft, t)
    per_sample = F.mse_loss(pred, noise, reduction="none").mean(dim=(1, 2, 3))
    snr = (ab / (1 - ab)).flatten()
    weight = snr.clamp(max=5.0) / snr
    return (weight * per_sample).mean()


class ClippedSGD(torch.optim.SGD):
    """SGD which clips the global norm first, as our trainer does."""

    def __init__(self, params, max_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_norm = max_norm

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        return super().step(closure)


def param_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]


# ----------------------------------------------------------------------------- JAX / flax.nnx


def sinusoid(timesteps, dim):
    half = dim // 2
    freqs = 10000.0 ** (-jnp.arange(half) / half)
    angles = jnp.outer(timesteps, freqs)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


def conv3(cin, cout, rngs):
    return nnx.Conv(cin, cout, kernel_size=(3, 3), padding="SAME", rngs=rngs)


class FiLMResBlock(nnx.Module):
    def __init__(self, cin, cout, *, rngs):
        self.norm1 = nnx.GroupNorm(cin, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)
        self.conv1 = conv3(cin, cout, rngs)
        self.emb_scale = nnx.Linear(EMB, cout, rngs=rngs)
        self.emb_shift = nnx.Linear(EMB, cout, rngs=rngs)
        self.norm2 = nnx.GroupNorm(cout, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)
        self.conv2 = conv3(cout, cout, rngs)
        self.skip = nnx.Conv(cin, cout, kernel_size=(1, 1), rngs=rngs) if cin != cout else None

    def __call__(self, x, emb):
        emb = nnx.silu(emb)
        gamma = self.emb_scale(emb)[:, None, None, :]
        beta = self.emb_shift(emb)[:, None, None, :]
        y = self.norm1(x)
        y = self.conv1(nnx.silu(y))
        y = self.norm2(y)
        y = y * gamma + y + beta
        y = self.conv2(nnx.silu(y))
        return y + (x if self.skip is None else self.skip(x))


class SpatialAttention(nnx.Module):
    def __init__(self, channels, heads, *, rngs):
        self.heads = heads
        self.norm = nnx.GroupNorm(channels, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)
        self.qkv = nnx.Linear(channels, 3 * channels, rngs=rngs)
        self.proj = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x):
        b, height, width, c = x.shape
        ch = c // self.heads
        packed = self.qkv(self.norm(x).reshape(b, height * width, c))
        packed = packed.reshape(b, height * width, self.heads, 3, ch)
        q, k, v = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(ch)
        probs = nnx.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probs, v)
        return x + self.proj(mixed.reshape(b, height * width, c)).reshape(x.shape)


class FlaxUNet(nnx.Module):
    def __init__(self, *, rngs):
        self.time1 = nnx.Linear(16, EMB, rngs=rngs)
        self.time2 = nnx.Linear(EMB, EMB, rngs=rngs)
        self.conv_in = conv3(6, BASE, rngs)
        self.res_down = FiLMResBlock(BASE, BASE, rngs=rngs)
        self.down = nnx.Conv(BASE, BASE, kernel_size=(3, 3), strides=2, padding=((1, 1), (1, 1)), rngs=rngs)
        self.res_mid = FiLMResBlock(BASE, MID, rngs=rngs)
        self.attn = SpatialAttention(MID, HEADS, rngs=rngs)
        self.up = conv3(MID, MID, rngs)
        self.res_up = FiLMResBlock(MID + BASE, BASE, rngs=rngs)
        self.norm_out = nnx.GroupNorm(BASE, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)
        self.conv_out = conv3(BASE, 3, rngs)

    def __call__(self, x, cond, t):
        emb = self.time1(sinusoid(t, 16))
        emb = self.time2(nnx.silu(emb))
        fine = self.conv_in(jnp.concatenate([x, cond], axis=-1))
        fine = self.res_down(fine, emb)
        coarse = self.down(fine)
        coarse = self.attn(self.res_mid(coarse, emb))
        coarse = jnp.repeat(jnp.repeat(coarse, 2, axis=1), 2, axis=2)
        coarse = self.up(coarse)
        out = self.res_up(jnp.concatenate([coarse, fine], axis=-1), emb)
        return self.conv_out(nnx.silu(self.norm_out(out)))


def clip_global_norm(max_norm, eps=1e-6):
    """torch.nn.utils.clip_grad_norm_ as a gradient transformation."""

    def update_fn(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.minimum(max_norm / (norm + eps), 1.0)
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def make_optimizer():
    decayed = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.chain(
        clip_global_norm(0.25),
        optax.add_decayed_weights(5e-3, mask=decayed),
        optax.sgd(0.05, momentum=0.9, nesterov=True),
    )


# ----------------------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = UNet()
    optimizer = ClippedSGD(param_groups(model, 5e-3), max_norm=0.25, lr=0.05, momentum=0.9, nesterov=True)
    x0, noise, t = make_batch()

    def loss_fn(x0, noise, t):
        return diffusion_loss(model, x0, noise, t)

    return stablenum_torch.program(
        loss_fn, torch.tensor(x0), torch.tensor(noise), torch.tensor(t), model=model, optimizer=optimizer
    )


def right():
    model = FlaxUNet(rngs=nnx.Rngs(0))
    x0, noise, t = make_batch()
    x0, noise = (np.transpose(a, (0, 2, 3, 1)) for a in (x0, noise))

    def loss_fn(model, x0, noise, t):
        abar = jnp.asarray(ALPHA_BAR)[t].reshape(-1, 1, 1, 1)
        signal, sigma = jnp.sqrt(abar), jnp.sqrt(1.0 - abar)
        noisy = signal * x0 + sigma * noise
        first = model(noisy, jnp.zeros_like(noisy), t)
        guess = jnp.clip((noisy - sigma * first) / signal, -1.0, 1.0)
        guess = jax.lax.stop_gradient(guess)
        error = jnp.square(model(noisy, guess, t) - noise)
        snr = jnp.ravel(abar / (1.0 - abar))
        weights = jnp.minimum(snr, 5.0) / snr
        return jnp.mean(weights * jnp.mean(error, axis=(1, 2, 3)))

    return stablenum_jax.program(
        loss_fn, model, jnp.asarray(x0), jnp.asarray(noise), jnp.asarray(t), optimizer=make_optimizer()
    )
