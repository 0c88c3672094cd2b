"""DDPM with a small U-Net and self-conditioning: NCHW modules in PyTorch, flax.nnx on NHWC in JAX."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as tnn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

CHANNELS, BASE, GROUPS, TIME_DIM = 3, 16, 4, 32
STEPS, BETA_START, BETA_END = 100, 1e-4, 0.05
LR, WARMUP = 1e-3, 20


def make_batch():
    rng = np.random.default_rng(17)
    clean = np.tanh(rng.normal(size=(4, 8, 8, CHANNELS)) + rng.normal(size=(4, 1, 8, 1)))
    noise = rng.normal(size=clean.shape)
    steps = np.array([3, 21, 48, 90])
    return clean.astype(np.float32), noise.astype(np.float32), steps.astype(np.int32)


# -------------------------------------------------------------- PyTorch


def timestep_embedding(timesteps, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
    args = timesteps[:, None] * freqs[None]
    return torch.cat([torch.sin(args), torch.cos(args)], dim=-1)


class ResnetBlock(tnn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.norm1 = tnn.GroupNorm(GROUPS, dim_in)
        self.conv1 = tnn.Conv2d(dim_in, dim_out, 3, padding=1)
        self.time_proj = tnn.Linear(TIME_DIM, dim_out)
        self.norm2 = tnn.GroupNorm(GROUPS, dim_out)
        self.conv2 = tnn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.shortcut = tnn.Conv2d(dim_in, dim_out, 1) if dim_in != dim_out else tnn.Identity()

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time_proj(F.silu(temb))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class AttnBlock(tnn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = tnn.GroupNorm(GROUPS, dim)
        self.qkv = tnn.Conv2d(dim, 3 * dim, 1)
        self.proj = tnn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3 * c, h * w).chunk(3, dim=1)
        weight = torch.bmm(q.transpose(1, 2), k) * c**-0.5
        weight = weight.softmax(dim=-1)
        out = torch.bmm(v, weight.transpose(1, 2)).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(tnn.Module):
    def __init__(self):
        super().__init__()
        self.time_mlp = tnn.Sequential(tnn.Linear(BASE, TIME_DIM), tnn.SiLU(), tnn.Linear(TIME_DIM, TIME_DIM))
        self.conv_in = tnn.Conv2d(2 * CHANNELS, BASE, 3, padding=1)
        self.down = ResnetBlock(BASE, BASE)
        self.downsample = tnn.Conv2d(BASE, 2 * BASE, 3, stride=2, padding=1)
        self.mid1 = ResnetBlock(2 * BASE, 2 * BASE)
        self.attn = AttnBlock(2 * BASE)
        self.mid2 = ResnetBlock(2 * BASE, 2 * BASE)
        self.upsample = tnn.Conv2d(2 * BASE, BASE, 3, padding=1)
        self.up = ResnetBlock(2 * BASE, BASE)
        self.norm_out = tnn.GroupNorm(GROUPS, BASE)
        self.conv_out = tnn.Conv2d(BASE, CHANNELS, 3, padding=1)

    def forward(self, x, self_cond, t):
        temb = self.time_mlp(timestep_embedding(t, BASE))
        x = self.conv_in(torch.cat([x, self_cond], dim=1))
        skip = self.down(x, temb)
        h = self.downsample(skip)
        h = self.mid1(h, temb)
        h = self.attn(h)
        h = self.mid2(h, temb)
        h = self.upsample(F.interpolate(h, scale_factor=2, mode="nearest"))
        h = self.up(torch.cat([h, skip], dim=1), temb)
        return self.conv_out(F.silu(self.norm_out(h)))


class Diffusion(tnn.Module):
    def __init__(self):
        super().__init__()
        self.unet = UNet()
        betas = torch.linspace(BETA_START, BETA_END, STEPS, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", alphas_cumprod.sqrt().float())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", (1.0 - alphas_cumprod).sqrt().float())

    def forward(self, x0, noise, t):
        signal = self.sqrt_alphas_cumprod[t][:, None, None, None]
        sigma = self.sqrt_one_minus_alphas_cumprod[t][:, None, None, None]
        x_t = signal * x0 + sigma * noise
        guess = self.unet(x_t, torch.zeros_like(x_t), t)
        self_cond = ((x_t - sigma * guess) / signal).clamp(-1, 1).detach()
        return F.mse_loss(self.unet(x_t, self_cond, t), noise)


# -------------------------------------------------------------- JAX


def make_schedule():
    betas = np.linspace(BETA_START, BETA_END, STEPS)
    alpha_bar = np.cumprod(1.0 - betas)
    return jnp.asarray(alpha_bar, jnp.float32), jnp.asarray(1.0 - alpha_bar, jnp.float32)


def sinusoidal(steps, width):
    count = width // 2
    frequencies = jnp.exp(jnp.arange(count) * (-np.log(10000.0) / (count - 1)))
    angles = jnp.einsum("b,f->bf", steps, frequencies)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def conv3(inputs, outputs, rngs, **kwargs):
    return nnx.Conv(inputs, outputs, (3, 3), rngs=rngs, **kwargs)


def group_norm(features, rngs):
    return nnx.GroupNorm(features, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)


class ResBlock(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.norm_a = group_norm(inputs, rngs)
        self.conv_a = conv3(inputs, outputs, rngs)
        self.shift = nnx.Linear(TIME_DIM, outputs, rngs=rngs)
        self.norm_b = group_norm(outputs, rngs)
        self.conv_b = conv3(outputs, outputs, rngs)
        if inputs != outputs:
            self.project = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x, time):
        y = self.conv_a(nnx.silu(self.norm_a(x)))
        y += self.shift(nnx.silu(time))[:, None, None]
        y = self.conv_b(nnx.silu(self.norm_b(y)))
        if hasattr(self, "project"):
            x = self.project(x)
        return x + y


class SpatialAttention(nnx.Module):
    def __init__(self, features, rngs):
        self.norm = group_norm(features, rngs)
        self.qkv = nnx.Linear(features, 3 * features, rngs=rngs)
        self.out = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        b, h, w, c = x.shape
        tokens = self.norm(x).reshape(b, h * w, c)
        q, k, v = jnp.split(self.qkv(tokens), 3, axis=-1)
        logits = jnp.einsum("bqc,bkc->bqk", q, k) / np.sqrt(c)
        mixed = jax.nn.softmax(logits, axis=-1) @ v
        return x + self.out(mixed).reshape(x.shape)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.time_in = nnx.Linear(BASE, TIME_DIM, rngs=rngs)
        self.time_out = nnx.Linear(TIME_DIM, TIME_DIM, rngs=rngs)
        self.stem = conv3(2 * CHANNELS, BASE, rngs)
        self.encode = ResBlock(BASE, BASE, rngs)
        self.shrink = conv3(BASE, 2 * BASE, rngs, strides=2, padding=1)
        self.middle_a = ResBlock(2 * BASE, 2 * BASE, rngs)
        self.attention = SpatialAttention(2 * BASE, rngs)
        self.middle_b = ResBlock(2 * BASE, 2 * BASE, rngs)
        self.grow = conv3(2 * BASE, BASE, rngs)
        self.decode = ResBlock(2 * BASE, BASE, rngs)
        self.norm = group_norm(BASE, rngs)
        self.head = conv3(BASE, CHANNELS, rngs)

    def __call__(self, x, previous, steps):
        time = self.time_out(nnx.silu(self.time_in(sinusoidal(steps, BASE))))
        x = self.stem(jnp.concatenate([x, previous], axis=-1))
        skip = self.encode(x, time)
        y = self.shrink(skip)
        y = self.middle_b(self.attention(self.middle_a(y, time)), time)
        b, h, w, c = y.shape
        y = jax.image.resize(y, (b, 2 * h, 2 * w, c), method="nearest")
        y = self.grow(y)
        y = self.decode(jnp.concatenate([y, skip], axis=-1), time)
        return self.head(nnx.silu(self.norm(y)))


def diffusion_loss(net, clean, noise, steps):
    alpha_bar, rest = make_schedule()
    expand = lambda table: table[steps].reshape(-1, 1, 1, 1)
    noisy = jnp.sqrt(expand(alpha_bar)) * clean + jnp.sqrt(expand(rest)) * noise
    first = net(noisy, jnp.zeros_like(noisy), steps)
    estimate = (noisy - jnp.sqrt(expand(rest)) * first) / jnp.sqrt(expand(alpha_bar))
    estimate = jax.lax.stop_gradient(jnp.clip(estimate, -1.0, 1.0))
    error = net(noisy, estimate, steps) - noise
    return jnp.mean(jnp.square(error))


def warm_up(count):
    return LR * jnp.minimum(1.0, (count + 1) / WARMUP)


# -------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Diffusion()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.99))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    clean, noise, steps = make_batch()

    def loss_fn(x0, noise, t):
        return model(x0.permute(0, 3, 1, 2), noise.permute(0, 3, 1, 2), t)

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(clean),
        torch.tensor(noise),
        torch.tensor(steps).long(),
        model=model,
        optimizer=optimizer,
    )


def right():
    graphdef, params = nnx.split(Net(nnx.Rngs(6)), nnx.Param)

    def loss_fn(params, clean, noise, steps):
        return diffusion_loss(nnx.merge(graphdef, params), clean, noise, steps)

    return stablenum_jax.program(
        loss_fn, params, *map(jnp.asarray, make_batch()), optimizer=optax.adam(warm_up, b1=0.9, b2=0.99)
    )
