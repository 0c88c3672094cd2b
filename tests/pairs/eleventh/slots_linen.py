"""Slot attention autoencoder (object discovery): PyTorch in NCHW, flax.linen in NHWC.

The gradient passes through the last iteration only, and straight to the initial slots.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

SIZE, SMALL, FEATURES, SLOT_DIM, SLOTS, ITERS, BATCH = 8, 4, 12, 16, 3, 3, 2
ATTN_EPS = 1e-8
LR, WARMUP, HALF_LIFE, MAX_NORM = 1e-2, 4, 50, 0.1


def make_batch():
    rng = np.random.default_rng(17)
    images = 0.1 * rng.normal(size=(BATCH, 3, SIZE, SIZE))
    for image in images:
        for _ in range(2):
            r, c = rng.integers(0, SIZE - 3, 2)
            image[:, r : r + 3, c : c + 3] += rng.normal(size=(3, 1, 1))
    noise = rng.normal(size=(BATCH, SLOTS, SLOT_DIM))
    return images.astype(np.float32), noise.astype(np.float32)


# ---------------------------------------------------------------- PyTorch


class SoftPositionEmbed(torch.nn.Module):
    def __init__(self, channels, resolution):
        super().__init__()
        self.proj = torch.nn.Linear(4, channels)
        y, x = torch.meshgrid(
            torch.linspace(0, 1, resolution), torch.linspace(0, 1, resolution), indexing="ij"
        )
        self.register_buffer("grid", torch.stack([x, y, 1 - x, 1 - y], dim=-1))

    def forward(self, x):
        return x + self.proj(self.grid).permute(2, 0, 1)


class SlotAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slots_mu = torch.nn.Parameter(0.3 * torch.randn(1, SLOTS, SLOT_DIM))
        self.slots_logsigma = torch.nn.Parameter(torch.full((1, 1, SLOT_DIM), -1.0))
        self.norm_inputs = torch.nn.LayerNorm(FEATURES)
        self.norm_slots = torch.nn.LayerNorm(SLOT_DIM)
        self.norm_mlp = torch.nn.LayerNorm(SLOT_DIM)
        self.to_q = torch.nn.Linear(SLOT_DIM, SLOT_DIM, bias=False)
        self.to_k = torch.nn.Linear(FEATURES, SLOT_DIM, bias=False)
        self.to_v = torch.nn.Linear(FEATURES, SLOT_DIM, bias=False)
        self.gru = torch.nn.GRUCell(SLOT_DIM, SLOT_DIM)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(SLOT_DIM, 2 * SLOT_DIM), torch.nn.ReLU(), torch.nn.Linear(2 * SLOT_DIM, SLOT_DIM)
        )

    def step(self, slots, k, v):
        b = slots.size(0)
        q = self.to_q(self.norm_slots(slots)) * SLOT_DIM**-0.5
        dots = q @ k.transpose(1, 2)
        attn = dots.softmax(dim=1) + ATTN_EPS
        attn = attn / attn.sum(dim=-1, keepdim=True)
        updates = attn @ v
        slots = self.gru(updates.reshape(-1, SLOT_DIM), slots.reshape(-1, SLOT_DIM)).view(b, -1, SLOT_DIM)
        return slots + self.mlp(self.norm_mlp(slots))

    def forward(self, inputs, noise):
        inputs = self.norm_inputs(inputs)
        k, v = self.to_k(inputs), self.to_v(inputs)
        initial = self.slots_mu + self.slots_logsigma.exp() * noise
        slots = initial
        for _ in range(ITERS - 1):
            slots = self.step(slots, k, v)
        slots = slots.detach() + initial - initial.detach()
        return self.step(slots, k, v)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.pos = SoftPositionEmbed(SLOT_DIM, SMALL)
        self.up = torch.nn.ConvTranspose2d(SLOT_DIM, FEATURES, 4, stride=2, padding=1)
        self.out = torch.nn.Conv2d(FEATURES, 4, 3, padding=1)

    def forward(self, slots):
        x = slots.flatten(0, 1)[:, :, None, None].expand(-1, -1, SMALL, SMALL)
        x = self.out(F.relu(self.up(self.pos(x))))
        return x.unflatten(0, (-1, SLOTS)).split([3, 1], dim=2)


class SlotAutoEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Conv2d(3, FEATURES, 5, padding=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(FEATURES, FEATURES, 3, padding=1),
            torch.nn.ReLU(),
        )
        self.pos = SoftPositionEmbed(FEATURES, SIZE)
        self.slot_attention = SlotAttention()
        self.decoder = Decoder()

    def forward(self, images, noise):
        x = self.pos(self.encoder(images))
        slots = self.slot_attention(x.flatten(2).transpose(1, 2), noise)
        rgb, alpha = self.decoder(slots)
        return (rgb * alpha.softmax(dim=1)).sum(dim=1)


def make_radam(model):
    optimizer = torch.optim.RAdam(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * 0.5 ** (step / HALF_LIFE)
    )

    def before(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def coordinate_grid(size):
    ticks = np.linspace(0.0, 1.0, size, dtype=np.float32)
    x, y = np.meshgrid(ticks, ticks, indexing="xy")
    return np.stack([x, y, 1 - x, 1 - y], axis=-1)


class PositionEmbedding(nn.Module):
    @nn.compact
    def __call__(self, maps):
        _, h, _, channels = maps.shape
        return maps + nn.Dense(channels, name="dense")(coordinate_grid(h))


class GatedUpdate(nn.Module):
    """A GRU cell with the gates in the order reset, update, candidate."""

    @nn.compact
    def __call__(self, h, x):
        width = h.shape[-1]
        from_x = nn.Dense(3 * width, name="from_x")(x)
        from_h = nn.Dense(3 * width, name="from_h")(h)
        xr, xz, xn = jnp.split(from_x, 3, axis=-1)
        hr, hz, hn = jnp.split(from_h, 3, axis=-1)
        z = nn.sigmoid(xz + hz)
        n = jnp.tanh(xn + nn.sigmoid(xr + hr) * hn)
        return n + z * (h - n)


class Competition(nn.Module):
    def setup(self):
        self.query_norm = nn.LayerNorm(epsilon=1e-5)
        self.query = nn.Dense(SLOT_DIM, use_bias=False)
        self.update = GatedUpdate()
        self.mlp_norm = nn.LayerNorm(epsilon=1e-5)
        self.widen = nn.Dense(2 * SLOT_DIM)
        self.narrow = nn.Dense(SLOT_DIM)

    def __call__(self, slots, keys, values):
        queries = self.query(self.query_norm(slots))
        logits = jnp.einsum("bsd,bnd->bsn", queries, keys) / np.sqrt(SLOT_DIM)
        weights = nn.softmax(logits, axis=1) + ATTN_EPS
        weights = weights / jnp.sum(weights, axis=2, keepdims=True)
        gathered = jnp.einsum("bsn,bnd->bsd", weights, values)
        slots = self.update(slots, gathered)
        return slots + self.narrow(nn.relu(self.widen(self.mlp_norm(slots))))


class SlotModel(nn.Module):
    @nn.compact
    def __call__(self, images, noise):
        batch = images.shape[0]
        x = nn.relu(nn.Conv(FEATURES, (5, 5), name="conv1")(images))
        x = nn.relu(nn.Conv(FEATURES, (3, 3), name="conv2")(x))
        x = PositionEmbedding(name="encoder_position")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="input_norm")(x.reshape(batch, -1, FEATURES))
        keys = nn.Dense(SLOT_DIM, use_bias=False, name="keys")(x)
        values = nn.Dense(SLOT_DIM, use_bias=False, name="values")(x)

        mean = self.param("slot_mean", nn.initializers.normal(0.3), (SLOTS, SLOT_DIM))
        log_std = self.param("slot_log_std", nn.initializers.constant(-1.0), (SLOT_DIM,))
        start = slots = mean + jnp.exp(log_std) * noise
        compete = Competition(name="compete")
        for _ in range(ITERS - 1):
            slots = compete(slots, keys, values)
        slots = start + jax.lax.stop_gradient(slots - start)
        slots = compete(slots, keys, values)

        grid = jnp.broadcast_to(
            slots.reshape(-1, 1, 1, SLOT_DIM), (batch * SLOTS, SMALL, SMALL, SLOT_DIM)
        )
        y = PositionEmbedding(name="decoder_position")(grid)
        y = nn.relu(nn.ConvTranspose(FEATURES, (4, 4), strides=(2, 2), transpose_kernel=True, name="deconv")(y))
        y = nn.Conv(4, (3, 3), name="to_rgba")(y)
        y = y.reshape(batch, SLOTS, SIZE, SIZE, 4)
        return jnp.sum(y[..., :3] * nn.softmax(y[..., 3:], axis=1), axis=1)


def clip_global(max_norm):
    def scale_down(grads, params=None):
        squares = [jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)]
        factor = max_norm / (jnp.sqrt(sum(squares)) + 1e-6)
        return jax.tree.map(lambda g: g * jnp.minimum(factor, 1.0), grads)

    return optax.stateless(scale_down)


def rate(count):
    return LR * jnp.minimum(1.0, (count + 1) / WARMUP) * 0.5 ** (count / HALF_LIFE)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = SlotAutoEncoder()
    images, noise = make_batch()

    def loss_fn(images, noise):
        return F.mse_loss(model(images, noise), images)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(noise), model=model, optimizer=make_radam(model)
    )


def right():
    images, noise = make_batch()
    images, noise = jnp.asarray(images.transpose(0, 2, 3, 1)), jnp.asarray(noise)
    model = SlotModel()
    params = model.init(jax.random.key(9), images, noise)["params"]

    def loss_fn(params, images, noise):
        restored = model.apply({"params": params}, images, noise)
        return jnp.mean(jnp.square(images - restored))

    tx = optax.chain(clip_global(MAX_NORM), optax.radam(rate))
    return stablenum_jax.program(loss_fn, params, images, noise, optimizer=tx)
