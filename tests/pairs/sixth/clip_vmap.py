"""A small contrastive image / text model (CLIP): PyTorch and plain JAX (named tuples, vmap over examples), Lion."""
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB, DIM, EMBED, SIZE, PATCH, LENGTH, BATCH = 30, 24, 16, 16, 4, 10, 6
LR, WEIGHT_DECAY = 3e-4, 0.5


def make_batch():
    rng = np.random.default_rng(3)
    images = rng.uniform(0, 255, size=(BATCH, 3, SIZE, SIZE)).astype(np.float32)
    tokens = rng.integers(1, VOCAB - 1, size=(BATCH, LENGTH)).astype(np.int64)
    for row, end in enumerate([9, 6, 4, 7, 5, 8]):
        tokens[row, end] = VOCAB - 1          # end of text: the largest id
        tokens[row, end + 1:] = 0             # padding
    return images, tokens


# ---------------------------------------------------------------- PyTorch

class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ResidualMLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), QuickGELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.mlp(self.ln(x))


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, PATCH, stride=PATCH, bias=False)
        self.pos = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, DIM) * 0.1)
        self.block = ResidualMLP(DIM)
        self.ln_post = nn.LayerNorm(DIM)
        self.proj = nn.Parameter(torch.randn(DIM, EMBED) * DIM ** -0.5)

    def forward(self, images):
        mean = images.mean(dim=(1, 2, 3), keepdim=True)
        std = images.std(dim=(1, 2, 3), keepdim=True)
        x = (images - mean) / std
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        x = self.block(x)
        return self.ln_post(x.mean(dim=1)) @ self.proj


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(LENGTH, DIM) * 0.1)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.block = ResidualMLP(DIM)
        self.ln_final = nn.LayerNorm(DIM)
        self.proj = nn.Parameter(torch.randn(DIM, EMBED) * DIM ** -0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.pos
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.ln_final(self.block(x))
        x = x[torch.arange(x.shape[0]), tokens.argmax(dim=-1)]
        return x @ self.proj


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = ImageTower()
        self.text = TextTower()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images, tokens):
        image = F.normalize(self.visual(images), dim=-1)
        text = F.normalize(self.text(tokens), dim=-1)
        scale = self.logit_scale.exp().clamp(max=100)
        return scale * image @ text.t()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = (m * b1 + p.grad * (1 - b1)).sign_()
                p.add_(update, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def left():
    torch.manual_seed(0)
    model = CLIP()
    no_decay = [p for name, p in model.named_parameters() if p.ndim < 2]
    decay = [p for p in model.parameters() if not any(p is q for q in no_decay)]
    optimizer = Lion([{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": no_decay, "weight_decay": 0.0}], lr=LR)
    images, tokens = make_batch()

    def loss_fn(images, tokens):
        logits = model(images, tokens)
        target = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    return stablenum_torch.program(loss_fn, torch.tensor(images), torch.tensor(tokens), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX: one example at a time

class Norm(NamedTuple):
    gain: jax.Array
    bias: jax.Array


class MLP(NamedTuple):
    norm: Norm
    w1: jax.Array
    b1: jax.Array
    w2: jax.Array
    b2: jax.Array


class Vision(NamedTuple):
    patch: jax.Array      # (patch, patch, 3, dim)
    pos: jax.Array
    block: MLP
    norm: Norm
    proj: jax.Array


class Text(NamedTuple):
    table: jax.Array
    pos: jax.Array
    conv_w: jax.Array     # (3, dim, dim)
    conv_b: jax.Array
    block: MLP
    norm: Norm
    proj: jax.Array


class Params(NamedTuple):
    vision: Vision
    text: Text
    log_scale: jax.Array


def init_params(key):
    keys = iter(jax.random.split(key, 12))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * 0.2
    norm = lambda: Norm(jnp.ones(DIM), jnp.zeros(DIM))
    mlp = lambda: MLP(norm(), normal(DIM, 2 * DIM), jnp.zeros(2 * DIM), normal(2 * DIM, DIM), jnp.zeros(DIM))
    patches = (SIZE // PATCH) ** 2
    return Params(
        Vision(normal(PATCH, PATCH, 3, DIM), normal(patches, DIM), mlp(), norm(), normal(DIM, EMBED)),
        Text(normal(VOCAB, DIM), normal(LENGTH, DIM), normal(3, DIM, DIM), jnp.zeros(DIM), mlp(), norm(), normal(DIM, EMBED)),
        jnp.asarray(math.log(1 / 0.07)),
    )


def layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred ** 2, -1, keepdims=True) + 1e-5) * p.gain + p.bias


def residual_mlp(p, x):
    h = layer_norm(p.norm, x) @ p.w1 + p.b1
    h = h * jax.nn.sigmoid(1.702 * h)
    return x + h @ p.w2 + p.b2


def standardize(image):
    mean = jnp.mean(image)
    std = jnp.std(image, ddof=1)
    return (image - mean) / std


def encode_image(p, image):
    """image: (3, size, size)."""
    n = SIZE // PATCH
    x = standardize(image)
    x = x.reshape(3, n, PATCH, n, PATCH).transpose(1, 3, 2, 4, 0).reshape(n * n, -1)
    x = residual_mlp(p.block, x @ p.patch.reshape(-1, DIM) + p.pos)
    return layer_norm(p.norm, x.mean(axis=0)) @ p.proj


def encode_text(p, tokens):
    table = p.table.at[0].set(jax.lax.stop_gradient(p.table[0]))   # the padding row is not trained
    x = table[tokens] + p.pos
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    windows = jnp.stack([padded[i:i + LENGTH] for i in range(3)], axis=1)
    x = x + jnp.einsum("tkd,kde->te", windows, p.conv_w) + p.conv_b
    end = jnp.argmax(tokens)
    return layer_norm(p.norm, residual_mlp(p.block, x[end])) @ p.proj


def unit(x):
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def contrastive_loss(logits):
    per_image = -jnp.diagonal(jax.nn.log_softmax(logits, axis=1))
    per_text = -jnp.diagonal(jax.nn.log_softmax(logits, axis=0))
    return 0.5 * (per_image.mean() + per_text.mean())


def right():
    params = init_params(jax.random.key(0))
    images, tokens = make_batch()
    matrices = jax.tree.map(lambda p: p.ndim > 1, params)
    optimizer = optax.lion(LR, b1=0.9, b2=0.99, weight_decay=WEIGHT_DECAY, mask=matrices)

    def loss_fn(params, images, tokens):
        image = unit(jax.vmap(encode_image, (None, 0))(params.vision, images))
        text = unit(jax.vmap(encode_text, (None, 0))(params.text, tokens))
        scale = jnp.minimum(jnp.exp(params.log_scale), 100.0)
        return contrastive_loss(scale * jnp.einsum("id,jd->ij", image, text))

    return stablenum_jax.program(loss_fn, params, images, tokens, optimizer=optimizer)
