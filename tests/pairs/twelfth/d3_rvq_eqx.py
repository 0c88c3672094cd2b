"""VQGAN-like autoencoder with residual vector quantisation: modules in PyTorch, equinox under vmap in JAX."""

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

SIZE, WIDTH, GROUPS, CODE_DIM = 8, 12, 4, 6
CODES, STAGES, COMMIT = 10, 2, 0.25
SMOOTH_BETA, LR, DECAY, CODE_LR = 0.3, 1e-3, 1e-2, 4e-3


def make_batch():
    rng = np.random.default_rng(5)
    coarse = rng.normal(size=(3, 3, 4, 4))
    images = np.kron(coarse, np.ones((2, 2))) + 0.3 * rng.normal(size=(3, 3, SIZE, SIZE))
    return (np.tanh(images).astype(np.float32),)


# ---------------------------------------------------------------- PyTorch


def nonlinearity(x):
    return x * torch.sigmoid(x)


class ResnetBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        h = self.conv1(nonlinearity(self.norm1(x)))
        return x + self.conv2(nonlinearity(self.norm2(h)))


class Downsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2, padding=0)

    def forward(self, x):
        # no asymmetric padding in torch conv, must do it ourselves
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class VectorQuantizer(nn.Module):
    def __init__(self, n_e, e_dim, beta):
        super().__init__()
        self.n_e, self.e_dim, self.beta = n_e, e_dim, beta
        self.embedding = nn.Embedding(n_e, e_dim)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, z):
        z = z.permute(0, 2, 3, 1).contiguous()
        z_flattened = z.view(-1, self.e_dim)
        d = (
            torch.sum(z_flattened**2, dim=1, keepdim=True)
            + torch.sum(self.embedding.weight**2, dim=1)
            - 2 * z_flattened @ self.embedding.weight.t()
        )
        z_q = self.embedding(torch.argmin(d, dim=1)).view(z.shape)
        commitment = torch.mean((z_q.detach() - z) ** 2)
        loss = self.beta * commitment + torch.mean((z_q - z.detach()) ** 2)
        z_q = z + (z_q - z).detach()
        return z_q.permute(0, 3, 1, 2).contiguous(), loss


class ResidualVQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([VectorQuantizer(CODES, CODE_DIM, COMMIT) for _ in range(STAGES)])

    def forward(self, x):
        quantized_out, residual, losses = 0.0, x, []
        for layer in self.layers:
            quantized, loss = layer(residual)
            residual = residual - quantized
            quantized_out = quantized_out + quantized
            losses.append(loss)
        return quantized_out, torch.stack(losses).mean()


class VQModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            ResnetBlock(WIDTH),
            Downsample(WIDTH),
            ResnetBlock(WIDTH),
            nn.Conv2d(WIDTH, CODE_DIM, 1),
        )
        self.quantize = ResidualVQ()
        self.decoder = nn.Sequential(
            nn.Conv2d(CODE_DIM, WIDTH, 3, padding=1),
            ResnetBlock(WIDTH),
            Upsample(WIDTH),
            nn.GroupNorm(GROUPS, WIDTH, eps=1e-6),
            nn.SiLU(),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )

    def forward(self, x):
        quant, emb_loss = self.quantize(self.encoder(x))
        return self.decoder(quant), emb_loss


# ---------------------------------------------------------------- JAX


class Residual(eqx.Module):
    norms: list
    convs: list

    def __init__(self, channels, key):
        self.norms = [eqx.nn.GroupNorm(GROUPS, channels, eps=1e-6) for _ in range(2)]
        self.convs = [eqx.nn.Conv2d(channels, channels, 3, padding=1, key=k) for k in jax.random.split(key)]

    def __call__(self, x):
        h = x
        for norm, conv in zip(self.norms, self.convs):
            h = conv(jax.nn.silu(norm(h)))
        return x + h


class Encoder(eqx.Module):
    inlet: eqx.nn.Conv2d
    high: Residual
    down: eqx.nn.Conv2d
    low: Residual
    outlet: eqx.nn.Conv2d

    def __init__(self, key):
        k = jax.random.split(key, 5)
        self.inlet = eqx.nn.Conv2d(3, WIDTH, 3, padding=1, key=k[0])
        self.high = Residual(WIDTH, k[1])
        self.down = eqx.nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=((0, 1), (0, 1)), key=k[2])
        self.low = Residual(WIDTH, k[3])
        self.outlet = eqx.nn.Conv2d(WIDTH, CODE_DIM, 1, key=k[4])

    def __call__(self, image):
        x = self.down(self.high(self.inlet(image)))
        return self.outlet(self.low(x))


class Decoder(eqx.Module):
    inlet: eqx.nn.Conv2d
    low: Residual
    up: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    outlet: eqx.nn.Conv2d

    def __init__(self, key):
        k = jax.random.split(key, 4)
        self.inlet = eqx.nn.Conv2d(CODE_DIM, WIDTH, 3, padding=1, key=k[0])
        self.low = Residual(WIDTH, k[1])
        self.up = eqx.nn.Conv2d(WIDTH, WIDTH, 3, padding=1, key=k[2])
        self.norm = eqx.nn.GroupNorm(GROUPS, WIDTH, eps=1e-6)
        self.outlet = eqx.nn.Conv2d(WIDTH, 3, 3, padding=1, key=k[3])

    def __call__(self, codes):
        x = self.low(self.inlet(codes))
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return self.outlet(jax.nn.silu(self.norm(self.up(x))))


def straight_through(value, gradient_of):
    return gradient_of + jax.lax.stop_gradient(value - gradient_of)


def quantise(vectors, codebook):
    """vectors: (n, dim) -> the nearest codes with straight-through gradient, and the loss of the codebook."""
    distance = jnp.sum((vectors[:, None] - codebook[None]) ** 2, axis=-1)
    codes = codebook[jnp.argmin(distance, axis=1)]
    to_codes = jnp.mean((vectors - jax.lax.stop_gradient(codes)) ** 2)
    to_vectors = jnp.mean((codes - jax.lax.stop_gradient(vectors)) ** 2)
    return straight_through(codes, vectors), to_vectors + COMMIT * to_codes


class Autoencoder(eqx.Module):
    encoder: Encoder
    codebooks: list
    decoder: Decoder

    def __init__(self, key):
        k = jax.random.split(key, 3)
        self.encoder, self.decoder = Encoder(k[0]), Decoder(k[1])
        self.codebooks = [0.5 * jax.random.normal(c, (CODES, CODE_DIM)) for c in jax.random.split(k[2], STAGES)]

    def __call__(self, images):
        latent = jnp.moveaxis(jax.vmap(self.encoder)(images), 1, -1)
        rest = latent.reshape(-1, CODE_DIM)
        total, penalty = jnp.zeros_like(rest), 0.0
        for codebook in self.codebooks:
            quantised, loss = quantise(rest, codebook)
            rest = rest - quantised
            total = total + quantised
            penalty = penalty + loss / STAGES
        maps = jnp.moveaxis(total.reshape(latent.shape), -1, 1)
        return jax.vmap(self.decoder)(maps), penalty


def group_labels(params):
    labels = jax.tree.map(lambda _: "network", params)
    return eqx.tree_at(lambda m: m.codebooks, labels, ["codes"] * STAGES)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(29)
    model = VQModel()
    optimizer = torch.optim.Adam(
        [
            {"params": [*model.encoder.parameters(), *model.decoder.parameters()], "weight_decay": DECAY},
            {"params": model.quantize.parameters(), "lr": CODE_LR},
        ],
        lr=LR,
        betas=(0.5, 0.9),
    )

    def loss_fn(images):
        xrec, qloss = model(images)
        return F.smooth_l1_loss(xrec, images, beta=SMOOTH_BETA) + qloss

    images, = make_batch()
    return stablenum_torch.program(loss_fn, torch.from_numpy(images), model=model, optimizer=optimizer)


def right():
    params, static = eqx.partition(Autoencoder(jax.random.key(2)), eqx.is_inexact_array)

    def loss_fn(params, images):
        restored, penalty = eqx.combine(params, static)(images)
        error = optax.huber_loss(restored, images, delta=SMOOTH_BETA) / SMOOTH_BETA
        return jnp.mean(error) + penalty

    tx = optax.multi_transform(
        {
            "network": optax.chain(optax.add_decayed_weights(DECAY), optax.adam(LR, b1=0.5, b2=0.9)),
            "codes": optax.adam(CODE_LR, b1=0.5, b2=0.9),
        },
        group_labels,
    )
    images, = make_batch()
    return stablenum_jax.program(loss_fn, params, jnp.asarray(images), optimizer=tx)
