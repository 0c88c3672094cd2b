"""Beta-VAE of small images: Conv2d and ConvTranspose2d in PyTorch, flax.nnx in NHWC; the noise is an argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

SIZE, CHANNELS, LATENT, BETA = 16, (6, 10), 5, 4.0
LR, EPS = 2e-3, 1e-3


def make_batch():
    rng = np.random.default_rng(41)
    rows, cols = np.mgrid[:SIZE, :SIZE] / SIZE
    phase = rng.uniform(0, 6, (2, 5, 1, 1))
    images = 0.5 + 0.25 * np.sin(7 * rows + phase[0]) + 0.25 * np.cos(9 * cols + phase[1])
    noise = rng.normal(size=(5, LATENT))
    return images[:, None].astype(np.float32), noise.astype(np.float32)


# -------------------------------------------------------------- PyTorch


class BetaVAE(nn.Module):
    def __init__(self):
        super().__init__()
        c1, c2 = CHANNELS
        self.encoder = nn.Sequential(
            nn.Conv2d(1, c1, 3, stride=2, padding=1),
            nn.BatchNorm2d(c1),
            nn.LeakyReLU(),
            nn.Conv2d(c1, c2, 3, stride=2, padding=1),
            nn.BatchNorm2d(c2),
            nn.LeakyReLU(),
        )
        self.fc_mu = nn.Linear(c2 * 16, LATENT)
        self.fc_var = nn.Linear(c2 * 16, LATENT)
        self.decoder_input = nn.Linear(LATENT, c2 * 16)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(c2, c1, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(c1),
            nn.LeakyReLU(),
        )
        self.final_layer = nn.ConvTranspose2d(c1, 1, 3, stride=2, padding=1, output_padding=1)

    def encode(self, x):
        result = torch.flatten(self.encoder(x), start_dim=1)
        return self.fc_mu(result), self.fc_var(result)

    def reparameterize(self, mu, logvar, eps):
        std = torch.exp(0.5 * logvar)
        return eps * std + mu

    def decode(self, z):
        result = self.decoder_input(z).view(-1, CHANNELS[-1], 4, 4)
        return self.final_layer(self.decoder(result))

    def forward(self, x, eps):
        mu, log_var = self.encode(x)
        z = self.reparameterize(mu, log_var, eps)
        return self.decode(z), mu, log_var


# -------------------------------------------------------------- JAX


class Encoder(nnx.Module):
    def __init__(self, rngs):
        c1, c2 = CHANNELS
        same = ((1, 1), (1, 1))
        self.conv1 = nnx.Conv(1, c1, (3, 3), strides=2, padding=same, rngs=rngs)
        self.bn1 = nnx.BatchNorm(c1, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(c1, c2, (3, 3), strides=2, padding=same, rngs=rngs)
        self.bn2 = nnx.BatchNorm(c2, momentum=0.9, rngs=rngs)
        self.mean = nnx.Linear(c2 * 16, LATENT, rngs=rngs)
        self.log_variance = nnx.Linear(c2 * 16, LATENT, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.bn1(self.conv1(x)))
        x = nnx.leaky_relu(self.bn2(self.conv2(x)))
        flat = jnp.moveaxis(x, -1, 1).reshape(x.shape[0], -1)
        return self.mean(flat), self.log_variance(flat)


class Decoder(nnx.Module):
    def __init__(self, rngs):
        c1, c2 = CHANNELS
        pad = ((1, 2), (1, 2))
        self.dense = nnx.Linear(LATENT, c2 * 16, rngs=rngs)
        self.up1 = nnx.ConvTranspose(
            c2, c1, (3, 3), strides=2, padding=pad, transpose_kernel=True, rngs=rngs
        )
        self.bn = nnx.BatchNorm(c1, momentum=0.9, rngs=rngs)
        self.up2 = nnx.ConvTranspose(
            c1, 1, (3, 3), strides=2, padding=pad, transpose_kernel=True, rngs=rngs
        )

    def __call__(self, z):
        h = self.dense(z).reshape(-1, CHANNELS[-1], 4, 4).transpose(0, 2, 3, 1)
        h = nnx.leaky_relu(self.bn(self.up1(h)))
        return self.up2(h)


class VAE(nnx.Module):
    def __init__(self, rngs):
        self.encoder = Encoder(rngs)
        self.decoder = Decoder(rngs)

    def __call__(self, images, noise):
        mean, log_variance = self.encoder(images)
        sigma = jnp.exp(log_variance / 2)
        return self.decoder(mean + sigma * noise), mean, log_variance


def kl_to_standard_normal(mean, log_variance):
    terms = jnp.exp(log_variance) + mean**2 - log_variance - 1.0
    return 0.5 * jnp.sum(terms, axis=-1)


# -------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = BetaVAE()
    model.train()
    images, noise = make_batch()

    def loss_fn(x, eps):
        recons, mu, log_var = model(x, eps)
        recons_loss = F.binary_cross_entropy_with_logits(recons, x, reduction="sum") / x.size(0)
        kld_loss = torch.mean(-0.5 * torch.sum(1 + log_var - mu**2 - log_var.exp(), dim=1), dim=0)
        return recons_loss + BETA * kld_loss

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(images),
        torch.tensor(noise),
        model=model,
        optimizer=torch.optim.Adamax(model.parameters(), lr=LR, eps=EPS),
    )


def right():
    images, noise = make_batch()
    model = VAE(nnx.Rngs(3))
    model.train()

    def loss_fn(model, images, noise):
        logits, mean, log_variance = model(images, noise)
        pixels = optax.sigmoid_binary_cross_entropy(logits, images)
        reconstruction = jnp.sum(pixels, axis=(1, 2, 3))
        return jnp.mean(reconstruction + BETA * kl_to_standard_normal(mean, log_variance))

    return stablenum_jax.program(
        loss_fn,
        model,
        jnp.asarray(np.moveaxis(images, 1, -1)),
        jnp.asarray(noise),
        optimizer=optax.adamax(LR, eps=EPS),
    )
