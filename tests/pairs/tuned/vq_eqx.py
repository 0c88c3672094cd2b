"""Vector-quantised autoencoder for small feature vectors. PyTorch original and Equinox port."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

FEATURES, HIDDEN, CODE, CODES, BETA = 14, 24, 8, 11, 0.25


def make_batch():
    rng = np.random.default_rng(123)
    return rng.normal(size=(8, FEATURES)).astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(CODES, CODE))

    def forward(self, z):
        distances = torch.cdist(z.detach(), self.codebook.detach())
        codes = self.codebook[distances.argmin(dim=-1)]
        codebook_loss = F.mse_loss(codes, z.detach())
        commitment = F.mse_loss(z, codes.detach())
        passed = z + (codes - z).detach()
        return passed, codebook_loss + BETA * commitment


class VQAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ELU(), nn.Linear(HIDDEN, CODE))
        self.norm = nn.LayerNorm(CODE)
        self.quantizer = Quantizer()
        self.decoder = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.ELU(), nn.Linear(HIDDEN, FEATURES))

    def forward(self, x):
        z = self.norm(self.encoder(x))
        quantized, extra = self.quantizer(z)
        return self.decoder(quantized), extra


def left():
    torch.manual_seed(12)
    model = VQAutoencoder()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    batch = torch.from_numpy(make_batch())

    def loss_fn(x):
        reconstruction, extra = model(x)
        return F.mse_loss(reconstruction, x) + extra

    return stablenum_torch.program(loss_fn, batch, model=model)


# ---------------------------------------------------------------- Equinox


class TwoLayer(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, inputs, outputs, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(inputs, HIDDEN, key=k1)
        self.second = eqx.nn.Linear(HIDDEN, outputs, key=k2)

    def __call__(self, x):
        hidden = jax.nn.elu(self.first(x))
        return self.second(hidden)


class VQ(eqx.Module):
    encoder: TwoLayer
    scale: jax.Array
    shift: jax.Array
    codebook: jax.Array
    decoder: TwoLayer

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.encoder = TwoLayer(FEATURES, CODE, k1)
        self.decoder = TwoLayer(CODE, FEATURES, k2)
        self.codebook = jax.random.normal(k3, (CODES, CODE))
        self.scale, self.shift = jnp.array([[1.0], [0.0]]) + 0.05 * jax.random.normal(k4, (2, CODE))

    def normalize(self, z):
        centered = z - jnp.mean(z)
        spread = jnp.sqrt(jnp.mean(centered**2) + 1e-5)
        return self.scale * centered / spread + self.shift

    def quantize(self, z):
        squares = jnp.sum(self.codebook**2, axis=-1)
        nearest = jnp.argmin(squares - 2.0 * self.codebook @ z)
        e = self.codebook[nearest]
        codebook_loss = jnp.mean((e - jax.lax.stop_gradient(z)) ** 2)
        commitment = jnp.mean((z - jax.lax.stop_gradient(e)) ** 2)
        straight = z + jax.lax.stop_gradient(e - z)
        return straight, codebook_loss + BETA * commitment

    def __call__(self, x):
        z = self.normalize(self.encoder(x))
        quantized, extra = self.quantize(z)
        reconstruction = self.decoder(quantized)
        error = jnp.mean((reconstruction - x) ** 2)
        return error + extra


def loss_fn(model, batch):
    losses = jax.vmap(model)(batch)
    return jnp.mean(losses)


def right():
    return stablenum_jax.program(loss_fn, VQ(jax.random.key(40)), jnp.asarray(make_batch()))
