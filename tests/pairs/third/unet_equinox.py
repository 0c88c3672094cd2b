"""A vector-quantised U-Net autoencoder: the PyTorch original and its equinox port (per sample, under vmap)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CODES, GROUPS, COMMITMENT = 10, 4, 0.25


def make_batch():
    rng = np.random.default_rng(23)
    clean = rng.normal(size=(4, 3, 16, 16)).astype(np.float32)
    noisy = clean + 0.3 * rng.normal(size=clean.shape).astype(np.float32)
    return noisy, clean


# ---------------------------------------------------------------- PyTorch

class ConvBlock(nn.Module):
    def __init__(self, channels_in, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels_in, channels, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, channels)

    def forward(self, x):
        x = self.conv(x)
        x = self.norm(x)
        return F.silu(x)


class VectorQuantizer(nn.Module):
    def __init__(self, codes, width):
        super().__init__()
        self.codebook = nn.Embedding(codes, width)

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1)
        distances = (flat.unsqueeze(-2) - self.codebook.weight).pow(2).sum(-1)
        picked = self.codebook(distances.argmin(-1)).permute(0, 3, 1, 2)
        codebook_loss = F.mse_loss(picked, z.detach())
        commitment_loss = F.mse_loss(z, picked.detach())
        quantized = z + (picked - z).detach()
        return quantized, codebook_loss + COMMITMENT * commitment_loss


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = ConvBlock(3, 16)
        self.enc2 = ConvBlock(16, 24)
        self.quantizer = VectorQuantizer(CODES, 24)
        self.mid = ConvBlock(24, 24)
        self.dec = ConvBlock(24 + 16, 16)
        self.head = nn.Conv2d(16, 3, 1)
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() == 1:
                    p.add_(0.2 * torch.randn_like(p))

    def forward(self, x):
        skip = self.enc1(x)
        low = F.interpolate(skip, scale_factor=0.5, mode="bilinear", align_corners=False)
        low = self.enc2(low)
        low, vq_loss = self.quantizer(low)
        low = self.mid(low)
        up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
        merged = torch.cat([up, skip], dim=1)
        return self.head(self.dec(merged)), vq_loss


def left():
    torch.manual_seed(8)
    model = UNet()
    noisy, clean = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(noisy, clean):
        recon, vq_loss = model(noisy)
        return F.mse_loss(recon, clean) + vq_loss

    return stablenum_torch.program(loss_fn, noisy, clean, model=model)


# ---------------------------------------------------------------- equinox

class GroupNormalization(eqx.Module):
    gamma: jax.Array
    beta: jax.Array
    groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, channels, groups, key, eps=1e-5):
        k1, k2 = jax.random.split(key)
        self.gamma = 1 + 0.2 * jax.random.normal(k1, (channels,))
        self.beta = 0.2 * jax.random.normal(k2, (channels,))
        self.groups, self.eps = groups, eps

    def __call__(self, image):
        grouped = image.reshape(self.groups, -1)
        mean = jnp.mean(grouped, axis=1, keepdims=True)
        variance = jnp.var(grouped, axis=1, keepdims=True)
        normal = (grouped - mean) * jax.lax.rsqrt(variance + self.eps)
        return normal.reshape(image.shape) * self.gamma[:, None, None] + self.beta[:, None, None]


class Stage(eqx.Module):
    convolution: eqx.nn.Conv2d
    normalization: GroupNormalization

    def __init__(self, channels_in, channels, key):
        k1, k2 = jax.random.split(key)
        self.convolution = eqx.nn.Conv2d(channels_in, channels, 3, padding=1, key=k1)
        self.normalization = GroupNormalization(channels, GROUPS, k2)

    def __call__(self, image):
        features = self.normalization(self.convolution(image))
        return jax.nn.silu(features)


def nearest_codes(table, pixels):
    """Squared distances by the expanded square; pixels: (H, W, C)."""
    cross = jnp.einsum("hwc,kc->hwk", pixels, table)
    squared = jnp.sum(pixels ** 2, -1)[..., None] - 2 * cross + jnp.sum(table ** 2, -1)
    return table[jnp.argmin(squared, axis=-1)]


class Autoencoder(eqx.Module):
    down_1: Stage
    down_2: Stage
    table: jax.Array
    middle: Stage
    up_1: Stage
    output: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.down_1, self.down_2 = Stage(3, 16, keys[0]), Stage(16, 24, keys[1])
        self.table = jax.random.normal(keys[2], (CODES, 24))
        self.middle, self.up_1 = Stage(24, 24, keys[3]), Stage(40, 16, keys[4])
        self.output = eqx.nn.Conv2d(16, 3, 1, key=keys[5])

    def quantize(self, latent):
        chosen = nearest_codes(self.table, latent.transpose(1, 2, 0)).transpose(2, 0, 1)
        codebook_term = jnp.mean((chosen - jax.lax.stop_gradient(latent)) ** 2)
        commitment_term = jnp.mean((latent - jax.lax.stop_gradient(chosen)) ** 2)
        passed = latent + jax.lax.stop_gradient(chosen - latent)
        return passed, codebook_term + COMMITMENT * commitment_term

    def __call__(self, image):
        bridge = self.down_1(image)
        small = jax.image.resize(bridge, (16, 8, 8), method="bilinear", antialias=False)
        passed, penalty = self.quantize(self.down_2(small))
        passed = self.middle(passed)
        large = jax.image.resize(passed, (24, 16, 16), method="bilinear")
        return self.output(self.up_1(jnp.concatenate([large, bridge], axis=0))), penalty


def right():
    def objective(model, noisy_images, clean_images):
        outputs, penalties = jax.vmap(model)(noisy_images)
        return jnp.mean(jnp.square(outputs - clean_images)) + jnp.mean(penalties)

    model = Autoencoder(jax.random.key(9))
    noisy_images, clean_images = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(objective, model, noisy_images, clean_images)
