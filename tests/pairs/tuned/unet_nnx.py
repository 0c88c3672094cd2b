"""Denoising U-Net with GroupNorm and bilinear resampling. PyTorch original and Flax NNX port."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

CHANNELS, BASE, GROUPS, SIZE = 2, 8, 4, 12


def make_batch():
    rng = np.random.default_rng(99)
    clean = rng.normal(size=(3, CHANNELS, SIZE, SIZE)).astype(np.float32)
    noisy = clean + 0.3 * rng.normal(size=clean.shape).astype(np.float32)
    return noisy, clean


# ---------------------------------------------------------------- PyTorch


class DoubleConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm1 = nn.GroupNorm(GROUPS, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, cout)

    def forward(self, x):
        x = F.silu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(x))
        return F.silu(y)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = DoubleConv(CHANNELS, BASE)
        self.squeeze = nn.Conv2d(BASE, 2 * BASE, 3, stride=2, padding=1)
        self.middle = DoubleConv(2 * BASE, 2 * BASE)
        self.shrink = nn.Conv2d(2 * BASE, BASE, 1)
        self.merge = DoubleConv(2 * BASE, BASE)
        self.leave = nn.Conv2d(BASE, CHANNELS, 1)

    def forward(self, noisy):
        top = self.enter(noisy)
        shrunk = self.squeeze(top)
        low = F.interpolate(shrunk, scale_factor=0.5, mode="bilinear", align_corners=False)
        low = self.middle(low)
        up = F.interpolate(low, size=top.shape[-2:], mode="bilinear", align_corners=False)
        up = self.shrink(up)
        joined = self.merge(torch.cat([top, up], dim=1))
        return noisy + self.leave(joined)


def left():
    torch.manual_seed(8)
    model = UNet()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    noisy, clean = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(noisy, clean):
        return F.smooth_l1_loss(model(noisy), clean, beta=0.5)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, alpha=0.9, eps=1e-5)
    return stablenum_torch.program(loss_fn, noisy, clean, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- NNX


class ConvPair(nnx.Module):
    def __init__(self, cin, cout, rngs):
        self.conv1 = nnx.Conv(cin, cout, kernel_size=(3, 3), padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(cout, cout, kernel_size=(3, 3), padding=1, rngs=rngs)
        self.gn1 = nnx.GroupNorm(cout, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)
        self.gn2 = nnx.GroupNorm(cout, num_groups=GROUPS, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        y = self.conv1(x)
        y = self.gn1(y)
        y = nnx.silu(y)
        y = self.conv2(y)
        z = self.gn2(y)
        return nnx.silu(z)


def resize(x, height, width):
    shape = (x.shape[0], height, width, x.shape[-1])
    return jax.image.resize(x, shape, method="bilinear", antialias=False)


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.enter = ConvPair(CHANNELS, BASE, rngs)
        self.squeeze = nnx.Conv(BASE, 2 * BASE, kernel_size=(3, 3), strides=2, padding=1, rngs=rngs)
        self.middle = ConvPair(2 * BASE, 2 * BASE, rngs)
        self.shrink = nnx.Conv(2 * BASE, BASE, kernel_size=(1, 1), rngs=rngs)
        self.merge = ConvPair(2 * BASE, BASE, rngs)
        self.leave = nnx.Conv(BASE, CHANNELS, kernel_size=(1, 1), rngs=rngs)

    def __call__(self, noisy):
        x = noisy.transpose(0, 2, 3, 1)
        top = self.enter(x)
        half = self.squeeze(top)
        low = resize(half, half.shape[1] // 2, half.shape[2] // 2)
        low = self.middle(low)
        up = resize(low, top.shape[1], top.shape[2])
        up = self.shrink(up)
        joined = self.merge(jnp.concatenate([top, up], axis=-1))
        residual = self.leave(joined)
        return noisy + residual.transpose(0, 3, 1, 2)


def smooth_l1(prediction, target, beta=0.5):
    distance = jnp.abs(prediction - target)
    quadratic = 0.5 * distance**2 / beta
    return jnp.where(distance < beta, quadratic, distance - 0.5 * beta)


def right():
    model = Denoiser(nnx.Rngs(13))
    leaves, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))
    keys = jax.random.split(jax.random.key(14), len(leaves))
    noise = [0.05 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)]
    nnx.update(model, treedef.unflatten([p + n for p, n in zip(leaves, noise)]))
    noisy, clean = (jnp.asarray(a) for a in make_batch())

    def loss_fn(model, noisy, clean):
        denoised = model(noisy)
        return jnp.mean(smooth_l1(denoised, clean))

    tx = optax.rmsprop(1e-3, decay=0.9, eps=1e-5, eps_in_sqrt=False)
    return stablenum_jax.program(loss_fn, model, noisy, clean, optimizer=tx)
