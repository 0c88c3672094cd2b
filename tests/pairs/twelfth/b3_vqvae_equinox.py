"""A vector-quantized autoencoder in the manner of VQGAN: PyTorch modules against Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

WIDTH, GROUPS, CODES, CODE_DIM = 16, 4, 12, 6
BETA, GN_EPS = 0.25, 1e-6
LR, BETAS, DECAY = 2e-3, (0.5, 0.9), 0.02


def make_batch():
    rng = np.random.default_rng(21)
    coarse = rng.normal(size=(3, 3, 4, 4)).repeat(4, 2).repeat(4, 3)
    return (coarse + 0.2 * rng.normal(size=(3, 3, 16, 16))).astype(np.float32)


# ---------------------------------------------------------------- PyTorch


def Normalize(channels):
    return nn.GroupNorm(GROUPS, channels, eps=GN_EPS)


class Downsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=0)

    def forward(self, x):
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class ResnetBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1 = Normalize(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = Normalize(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return x + h


class AttnBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = Normalize(channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = self.q(y).flatten(2), self.k(y).flatten(2), self.v(y).flatten(2)
        weights = torch.bmm(q.transpose(1, 2), k) * c**-0.5
        weights = F.softmax(weights, dim=2)
        y = torch.bmm(v, weights.transpose(1, 2)).reshape(b, c, h, w)
        return x + self.proj_out(y)


class VectorQuantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CODES, CODE_DIM)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1)
        flat = z.reshape(-1, CODE_DIM)
        codes = torch.cdist(flat, self.embedding.weight).argmin(dim=1)
        z_q = self.embedding(codes).view(z.shape)
        codebook = F.mse_loss(z_q, z.detach())
        commitment = F.mse_loss(z, z_q.detach())
        z_q = z + (z_q - z).detach()
        return z_q.permute(0, 3, 1, 2), codebook + BETA * commitment


class VQModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1), ResnetBlock(WIDTH), Downsample(WIDTH), AttnBlock(WIDTH)
        )
        self.quant_conv = nn.Conv2d(WIDTH, CODE_DIM, 1)
        self.quantize = VectorQuantizer()
        self.post_quant_conv = nn.Conv2d(CODE_DIM, WIDTH, 1)
        self.decoder = nn.Sequential(ResnetBlock(WIDTH), Upsample(WIDTH))
        self.norm_out = Normalize(WIDTH)
        self.conv_out = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x):
        z_q, vq_loss = self.quantize(self.quant_conv(self.encoder(x)))
        h = self.decoder(self.post_quant_conv(z_q))
        return self.conv_out(F.silu(self.norm_out(h))), vq_loss


# ---------------------------------------------------------------- JAX


def group_norm(channels):
    return eqx.nn.GroupNorm(GROUPS, channels, eps=GN_EPS)


def conv(n_in, n_out, size, key):
    return eqx.nn.Conv2d(n_in, n_out, size, padding=size // 2, key=key)


class Residual(eqx.Module):
    norm1: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv2d
    norm2: eqx.nn.GroupNorm
    conv2: eqx.nn.Conv2d

    def __init__(self, channels, key):
        k1, k2 = jax.random.split(key)
        self.norm1 = group_norm(channels)
        self.conv1 = conv(channels, channels, 3, k1)
        self.norm2 = group_norm(channels)
        self.conv2 = conv(channels, channels, 3, k2)

    def __call__(self, x):
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        return x + self.conv2(jax.nn.silu(self.norm2(h)))


class Attention(eqx.Module):
    norm: eqx.nn.GroupNorm
    q: eqx.nn.Conv2d
    k: eqx.nn.Conv2d
    v: eqx.nn.Conv2d
    proj_out: eqx.nn.Conv2d

    def __init__(self, channels, key):
        keys = jax.random.split(key, 4)
        self.norm = group_norm(channels)
        self.q, self.k, self.v, self.proj_out = (conv(channels, channels, 1, k) for k in keys)

    def __call__(self, x):
        y = self.norm(x)
        q, k, v = (f(y).reshape(x.shape[0], -1) for f in (self.q, self.k, self.v))
        scores = jnp.einsum("ci,cj->ij", q, k) / jnp.sqrt(x.shape[0])
        attention = jax.nn.softmax(scores, axis=1)
        y = jnp.einsum("ij,cj->ci", attention, v)
        return x + self.proj_out(y.reshape(x.shape))


class Encoder(eqx.Module):
    conv_in: eqx.nn.Conv2d
    block: Residual
    down: eqx.nn.Conv2d
    attn: Attention

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.conv_in = conv(3, WIDTH, 3, keys[0])
        self.block = Residual(WIDTH, keys[1])
        self.down = eqx.nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=((0, 1), (0, 1)), key=keys[2])
        self.attn = Attention(WIDTH, keys[3])

    def __call__(self, x):
        return self.attn(self.down(self.block(self.conv_in(x))))


class Decoder(eqx.Module):
    block: Residual
    up: eqx.nn.Conv2d
    norm_out: eqx.nn.GroupNorm
    conv_out: eqx.nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.block = Residual(WIDTH, keys[0])
        self.up = conv(WIDTH, WIDTH, 3, keys[1])
        self.norm_out = group_norm(WIDTH)
        self.conv_out = conv(WIDTH, 3, 3, keys[2])

    def __call__(self, x):
        x = self.block(x)
        x = self.up(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
        return self.conv_out(jax.nn.silu(self.norm_out(x)))


class Quantizer(eqx.Module):
    codebook: eqx.nn.Embedding

    def __init__(self, key):
        self.codebook = eqx.nn.Embedding(CODES, CODE_DIM, key=key)

    def __call__(self, z):
        flat = z.reshape(CODE_DIM, -1).T
        table = self.codebook.weight
        distances = (flat**2).sum(1, keepdims=True) - 2 * flat @ table.T + (table**2).sum(1)
        codes = jax.vmap(self.codebook)(jnp.argmin(distances, axis=1))
        to_codes = jnp.mean((codes - jax.lax.stop_gradient(flat)) ** 2)
        to_encoder = jnp.mean((flat - jax.lax.stop_gradient(codes)) ** 2)
        quantized = flat + jax.lax.stop_gradient(codes - flat)
        return quantized.T.reshape(z.shape), to_codes + BETA * to_encoder


class Autoencoder(eqx.Module):
    encoder: Encoder
    quant_conv: eqx.nn.Conv2d
    quantize: Quantizer
    post_quant_conv: eqx.nn.Conv2d
    decoder: Decoder

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.encoder = Encoder(keys[0])
        self.quant_conv = conv(WIDTH, CODE_DIM, 1, keys[1])
        self.quantize = Quantizer(keys[2])
        self.post_quant_conv = conv(CODE_DIM, WIDTH, 1, keys[3])
        self.decoder = Decoder(keys[4])

    def __call__(self, image):
        latent = self.quant_conv(self.encoder(image))
        quantized, penalty = self.quantize(latent)
        return self.decoder(self.post_quant_conv(quantized)), penalty


def make_optimizer():
    return optax.chain(
        optax.add_decayed_weights(DECAY),
        optax.adam(LR, b1=BETAS[0], b2=BETAS[1]),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(4)
    model = VQModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY)

    def loss_fn(images):
        restored, vq_loss = model(images)
        rec_loss = F.mse_loss(restored, images) / images.var(unbiased=False)
        return rec_loss + vq_loss

    return stablenum_torch.program(loss_fn, torch.from_numpy(make_batch()), model=model, optimizer=optimizer)


def right():
    params, static = eqx.partition(Autoencoder(jax.random.key(9)), eqx.is_inexact_array)

    def loss_fn(params, images):
        model = eqx.combine(params, static)
        restored, penalties = jax.vmap(model)(images)
        error = jnp.mean((restored - images) ** 2) / jnp.var(images)
        return error + penalties.mean()

    return stablenum_jax.program(loss_fn, params, jnp.asarray(make_batch()), optimizer=make_optimizer())
