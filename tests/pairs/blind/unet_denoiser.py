"""Noise-conditional image denoiser: a two-level U-Net with a quantised bottleneck.

Reference implementation in PyTorch, re-implementation with Flax NNX (channels last).
"""
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

BASE, GROUPS, LEVELS, T_DIM = 8, 4, 4.0, 12


def noisy_images():
    rng = np.random.default_rng(12)
    clean = rng.normal(size=(2, 16, 16, 3)).astype(np.float32)
    sigma = rng.uniform(0.1, 1.0, size=(2,)).astype(np.float32)
    noise = rng.normal(size=clean.shape).astype(np.float32)
    return clean, sigma, noise


def perturb(parameters):
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1 * torch.randn_like(p))


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.time = nn.Linear(T_DIM, c_out)
        self.norm2 = nn.GroupNorm(GROUPS, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1)
        perturb([*self.norm1.parameters(), *self.norm2.parameters()])

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_in = nn.Linear(T_DIM, T_DIM)
        self.conv_in = nn.Conv2d(3, BASE, 3, padding=1)
        self.enc = ResBlock(BASE, BASE)
        self.down = nn.Conv2d(BASE, 2 * BASE, 3, stride=2, padding=1)
        self.mid = ResBlock(2 * BASE, 2 * BASE)
        self.dec = ResBlock(3 * BASE, BASE)
        self.conv_out = nn.Conv2d(BASE, 3, 3, padding=1)

    def forward(self, x, sigma):
        half = T_DIM // 2
        angles = sigma[:, None].log() * torch.arange(1, half + 1, dtype=x.dtype)
        t = self.time_in(torch.cat([angles.sin(), angles.cos()], dim=1))
        skip = self.enc(self.conv_in(x), t)
        z = torch.tanh(self.mid(self.down(skip), t))
        z = z + (torch.round(z * LEVELS) / LEVELS - z).detach()
        up = F.interpolate(z, scale_factor=2, mode="bilinear", align_corners=False)
        h = self.dec(torch.cat([up, skip], dim=1), t)
        return self.conv_out(F.silu(h))


def left():
    torch.manual_seed(64)
    net = UNet()

    def loss_fn(clean, sigma, noise):
        x = clean + sigma[:, None, None, None] * noise
        predicted = net(x, sigma)
        per_image = (predicted - noise).pow(2).mean(dim=(1, 2, 3))
        return (per_image / (1 + sigma**2)).mean()

    clean, sigma, noise = (torch.from_numpy(a) for a in noisy_images())
    nchw = (0, 3, 1, 2)
    return stablenum_torch.program(loss_fn, clean.permute(nchw), sigma, noise.permute(nchw), model=net)


class GroupNorm(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs):
        self.scale = nnx.Param(1 + 0.1 * jax.random.normal(rngs.params(), (channels,)))
        self.bias = nnx.Param(0.1 * jax.random.normal(rngs.params(), (channels,)))

    def __call__(self, x):
        b, h, w, c = x.shape
        axes = (1, 2, 4)
        g = x.reshape(b, h, w, GROUPS, c // GROUPS)
        mean = g.mean(axes, keepdims=True)
        var = jnp.square(g - mean).mean(axes, keepdims=True)
        g = (g - mean) / jnp.sqrt(var + 1e-5)
        return g.reshape(x.shape) * self.scale[...] + self.bias[...]


def conv(c_in, c_out, rngs, size=3, stride=1):
    pad = size // 2
    bias_init = nnx.initializers.normal(0.05)
    return nnx.Conv(c_in, c_out, (size, size), strides=stride, padding=pad, bias_init=bias_init, rngs=rngs)


class Residual(nnx.Module):
    def __init__(self, c_in, c_out, rngs):
        self.norm1 = GroupNorm(c_in, rngs)
        self.conv1 = conv(c_in, c_out, rngs)
        self.time = nnx.Linear(T_DIM, c_out, bias_init=nnx.initializers.normal(0.05), rngs=rngs)
        self.norm2 = GroupNorm(c_out, rngs)
        self.conv2 = conv(c_out, c_out, rngs)
        self.skip = conv(c_in, c_out, rngs, size=1)

    def __call__(self, x, t):
        h = self.conv1(nnx.silu(self.norm1(x)))
        h += self.time(nnx.silu(t))[:, None, None, :]
        h = self.conv2(nnx.silu(self.norm2(h)))
        return self.skip(x) + h


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.time_in = nnx.Linear(T_DIM, T_DIM, bias_init=nnx.initializers.normal(0.05), rngs=rngs)
        self.conv_in = conv(3, BASE, rngs)
        self.enc = Residual(BASE, BASE, rngs)
        self.down = conv(BASE, 2 * BASE, rngs, stride=2)
        self.mid = Residual(2 * BASE, 2 * BASE, rngs)
        self.dec = Residual(3 * BASE, BASE, rngs)
        self.conv_out = conv(BASE, 3, rngs)

    def embed(self, sigma):
        angles = jnp.log(sigma)[:, None] * jnp.arange(1, T_DIM // 2 + 1)
        return self.time_in(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))

    def __call__(self, x, sigma):
        t = self.embed(sigma)
        skip = self.enc(self.conv_in(x), t)
        z = jnp.tanh(self.mid(self.down(skip), t))
        z = z + jax.lax.stop_gradient(jnp.round(z * LEVELS) / LEVELS - z)
        b, h, w, c = z.shape
        up = jax.image.resize(z, (b, 2 * h, 2 * w, c), method="bilinear")
        h = self.dec(jnp.concatenate([up, skip], axis=-1), t)
        return self.conv_out(nnx.silu(h))


def denoising_loss(model, clean, sigma, noise):
    noisy = clean + sigma.reshape(-1, 1, 1, 1) * noise
    error = jnp.mean((model(noisy, sigma) - noise) ** 2, axis=(1, 2, 3))
    return jnp.mean(error / (1.0 + sigma**2))


def right():
    model = Denoiser(nnx.Rngs(3))
    return stablenum_jax.program(denoising_loss, model, *[jnp.asarray(a) for a in noisy_images()])
