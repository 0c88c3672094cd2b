"""VQ-VAE on small images: strided convs and ConvTranspose2d in PyTorch, flax.nnx in JAX."""

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

HIDDEN, LATENT, CODES, RES = 12, 8, 16, 6
BETA, LR = 0.25, 2e-4


def make_batch():
    rng = np.random.default_rng(17)
    return rng.uniform(-0.5, 0.5, (3, 3, 12, 12)).astype(np.float32)


DATA_VARIANCE = float(np.var(make_batch()))


# ------------------------------------------------------------------- PyTorch


class Residual(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(True),
            nn.Conv2d(channels, hidden, 3, padding=1),
            nn.ReLU(True),
            nn.Conv2d(hidden, channels, 1),
        )

    def forward(self, x):
        return x + self.block(x)


class VectorQuantizer(nn.Module):
    def __init__(self, codes, dim, beta):
        super().__init__()
        self.dim, self.beta = dim, beta
        self.embedding = nn.Embedding(codes, dim)
        self.embedding.weight.data.uniform_(-0.5, 0.5)

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, self.dim)
        distances = (
            flat.pow(2).sum(1, keepdim=True)
            + self.embedding.weight.pow(2).sum(1)
            - 2 * flat @ self.embedding.weight.t()
        )
        indices = distances.argmin(1)
        quantized = self.embedding(indices).view(inputs.shape)
        codebook = F.mse_loss(quantized, inputs.detach())
        commitment = F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        return quantized.permute(0, 3, 1, 2).contiguous(), codebook + self.beta * commitment


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, HIDDEN, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(HIDDEN, HIDDEN, 3, padding=1),
            Residual(HIDDEN, RES),
            nn.ReLU(),
        )
        self.pre_vq = nn.Conv2d(HIDDEN, LATENT, 1)
        self.vq = VectorQuantizer(CODES, LATENT, BETA)
        self.decoder = nn.Sequential(
            nn.Conv2d(LATENT, HIDDEN, 3, padding=1),
            Residual(HIDDEN, RES),
            nn.ReLU(),
            nn.ConvTranspose2d(HIDDEN, 3, 4, stride=2, padding=1),
        )

    def forward(self, x):
        z, vq_loss = self.vq(self.pre_vq(self.encoder(x)))
        return self.decoder(z), vq_loss


# ------------------------------------------------------------------- JAX


class ResidualBlock(nnx.Module):
    def __init__(self, channels, hidden, rngs):
        self.conv3 = nnx.Conv(channels, hidden, (3, 3), rngs=rngs)
        self.conv1 = nnx.Conv(hidden, channels, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(x)  # the first ReLU of the original works in place
        h = self.conv3(x)
        return x + self.conv1(nnx.relu(h))


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.down = nnx.Conv(3, HIDDEN, (4, 4), strides=(2, 2), padding=[(1, 1), (1, 1)], rngs=rngs)
        self.conv = nnx.Conv(HIDDEN, HIDDEN, (3, 3), rngs=rngs)
        self.res = ResidualBlock(HIDDEN, RES, rngs)
        self.to_latent = nnx.Conv(HIDDEN, LATENT, (1, 1), rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.down(x))
        x = self.res(self.conv(x))
        return self.to_latent(nnx.relu(x))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(LATENT, HIDDEN, (3, 3), rngs=rngs)
        self.res = ResidualBlock(HIDDEN, RES, rngs)
        self.up = nnx.ConvTranspose(
            HIDDEN, 3, (4, 4), strides=(2, 2), padding="SAME", transpose_kernel=True, rngs=rngs
        )

    def __call__(self, z):
        h = self.res(self.conv(z))
        return self.up(nnx.relu(h))


def nearest_code(z, codebook):
    offsets = z[..., None, :] - codebook
    return jnp.argmin(jnp.sum(offsets**2, axis=-1), axis=-1)


class Autoencoder(nnx.Module):
    def __init__(self, rngs):
        self.encoder = Encoder(rngs)
        self.decoder = Decoder(rngs)
        self.codebook = nnx.Param(jax.random.uniform(rngs.params(), (CODES, LATENT), minval=-0.5, maxval=0.5))

    def __call__(self, x):
        sg = jax.lax.stop_gradient
        z = self.encoder(x)
        codes = self.codebook[nearest_code(z, self.codebook[...])]
        loss = jnp.mean((codes - sg(z)) ** 2) + BETA * jnp.mean((sg(codes) - z) ** 2)
        passed = z + sg(codes - z)
        return self.decoder(passed), loss


# ------------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = VQVAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99))
    images = torch.from_numpy(make_batch())

    def loss_fn(images):
        reconstruction, vq_loss = model(images)
        return F.mse_loss(reconstruction, images) / DATA_VARIANCE + vq_loss

    return stablenum_torch.program(loss_fn, images, model=model, optimizer=optimizer)


def right():
    model = Autoencoder(nnx.Rngs(0))
    images = jnp.asarray(make_batch().transpose(0, 2, 3, 1))

    def loss_fn(model, images):
        reconstruction, vq_loss = model(images)
        error = optax.squared_error(reconstruction, images).mean()
        return error / DATA_VARIANCE + vq_loss

    optimizer = optax.adamw(LR, b1=0.9, b2=0.99, weight_decay=1e-2)
    return stablenum_jax.program(loss_fn, model, images, optimizer=optimizer)
