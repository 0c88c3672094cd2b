"""ConvNeXt-V2-like autoencoder with a rounded (FSQ) bottleneck, cosine schedule with warm-up."""
import math

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

PEAK_LR, WARMUP, TOTAL = 4e-3, 10, 200
LEVELS = 4


def make_batch():
    rng = np.random.default_rng(5)
    return rng.normal(size=(4, 3, 16, 16)).astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class LayerNorm2d(nn.Module):
    """LayerNorm over the channels of (N, C, H, W)."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(0.3 * torch.randn(1, dim, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, dim, 1, 1))

    def forward(self, x):
        gx = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        nx = gx / (gx.mean(dim=1, keepdim=True) + 1e-6)
        return self.gamma * (x * nx) + self.beta + x


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=5, padding=2, groups=dim)
        self.norm = LayerNorm2d(dim)
        self.pwconv1 = nn.Conv2d(dim, 2 * dim, kernel_size=1)
        self.act = nn.GELU()
        self.grn = GRN(2 * dim)
        self.pwconv2 = nn.Conv2d(2 * dim, dim, kernel_size=1)

    def forward(self, x):
        y = self.norm(self.dwconv(x))
        y = self.grn(self.act(self.pwconv1(y)))
        return x + self.pwconv2(y)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class AutoEncoder(nn.Module):
    def __init__(self, dims=(12, 24), latent=6):
        super().__init__()
        c1, c2 = dims
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c1, 3, stride=2, padding=1),
            Block(c1),
            LayerNorm2d(c1),
            nn.Conv2d(c1, c2, 3, stride=2, padding=1),
            Block(c2),
        )
        self.to_latent = nn.Conv2d(c2, latent, 1)
        self.from_latent = nn.Conv2d(latent, c2, 1)
        self.decoder = nn.Sequential(
            Block(c2),
            nn.ConvTranspose2d(c2, c1, 3, stride=2, padding=1, output_padding=1),
            Block(c1),
            LayerNorm2d(c1),
            nn.ConvTranspose2d(c1, 3, 3, stride=2, padding=1, output_padding=1),
        )

    def forward(self, x):
        z = torch.tanh(self.to_latent(self.encoder(x)))
        z = RoundSTE.apply(z * LEVELS) / LEVELS
        return self.decoder(self.from_latent(z))


def lr_factor(step):
    step = step + 1
    if step < WARMUP:
        return step / WARMUP
    progress = (step - WARMUP) / (TOTAL - WARMUP)
    return 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


# ---------------------------------------------------------------- JAX (flax linen, NHWC)


class GlobalResponseNorm(linen.Module):
    @linen.compact
    def __call__(self, x):
        gamma = self.param("gamma", linen.initializers.zeros, (x.shape[-1],))
        beta = self.param("beta", linen.initializers.zeros, (x.shape[-1],))
        energy = jnp.sqrt(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True))
        relative = energy / (jnp.mean(energy, axis=-1, keepdims=True) + 1e-6)
        return x * (1.0 + gamma * relative) + beta


class ConvNeXtBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        dim = x.shape[-1]
        h = linen.Conv(dim, (5, 5), feature_group_count=dim, name="dwconv")(x)
        h = linen.LayerNorm(epsilon=1e-6, use_fast_variance=False, name="norm")(h)
        h = linen.Dense(2 * dim, name="pwconv1")(h)
        h = linen.gelu(h, approximate=False)
        h = GlobalResponseNorm(name="grn")(h)
        h = linen.Dense(dim, name="pwconv2")(h)
        return h + x


def quantize(z):
    """Round to the grid, gradient passes straight through."""
    rounded = jnp.round(z * LEVELS) / LEVELS
    return z + jax.lax.stop_gradient(rounded - z)


class ConvAutoEncoder(linen.Module):
    dims: tuple = (12, 24)
    latent: int = 6

    @linen.compact
    def __call__(self, x):
        c1, c2 = self.dims
        x = linen.Conv(c1, (3, 3), strides=2, padding=1, name="stem")(x)
        x = ConvNeXtBlock(name="enc_block1")(x)
        x = linen.LayerNorm(epsilon=1e-6, use_fast_variance=False, name="down_norm")(x)
        x = linen.Conv(c2, (3, 3), strides=2, padding=1, name="down")(x)
        x = ConvNeXtBlock(name="enc_block2")(x)
        z = jnp.tanh(linen.Dense(self.latent, name="to_latent")(x))
        x = linen.Dense(c2, name="from_latent")(quantize(z))
        x = ConvNeXtBlock(name="dec_block1")(x)
        x = linen.ConvTranspose(
            c1, (3, 3), strides=(2, 2), padding=((1, 2), (1, 2)), transpose_kernel=True, name="up1"
        )(x)
        x = ConvNeXtBlock(name="dec_block2")(x)
        x = linen.LayerNorm(epsilon=1e-6, use_fast_variance=False, name="up_norm")(x)
        return linen.ConvTranspose(
            3, (3, 3), strides=(2, 2), padding=((1, 2), (1, 2)), transpose_kernel=True, name="up2")(x)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = AutoEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    images = make_batch()

    def loss_fn(images):
        return F.mse_loss(model(images), images)

    return stablenum_torch.program(loss_fn, torch.tensor(images), model=model, optimizer=optimizer)


def right():
    model = ConvAutoEncoder()
    params = model.init(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=PEAK_LR / WARMUP, peak_value=PEAK_LR, warmup_steps=WARMUP - 1, decay_steps=TOTAL - 1
    )
    optimizer = optax.adamw(schedule, weight_decay=0.05)
    images = make_batch()

    def loss_fn(params, images):
        images = jnp.transpose(images, (0, 2, 3, 1))
        recon = model.apply({"params": params}, images)
        return jnp.mean(jnp.square(recon - images))

    return stablenum_jax.program(loss_fn, params, images, optimizer=optimizer)
