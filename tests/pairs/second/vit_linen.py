"""A small vision transformer classifier: the PyTorch original and its port to flax linen."""
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

IMAGE, PATCH, DIM, HEADS, HIDDEN, DEPTH, CLASSES = 16, 4, 24, 3, 48, 2, 7
TOKENS = (IMAGE // PATCH) ** 2 + 1
SMOOTHING = 0.1


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(4, 3, IMAGE, IMAGE)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(4,))
    return images, labels


# ---------------------------------------------------------------- PyTorch

class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(3, DIM, kernel_size=PATCH, stride=PATCH)

    def forward(self, images):
        grid = self.proj(images)
        return grid.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(DIM, eps=1e-06)
        self.fc1 = nn.Linear(DIM, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y = self.norm2(x)
        y = F.gelu(self.fc1(y))
        return x + self.fc2(y)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(0.2 * torch.randn(1, TOKENS, DIM))
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        patches = self.patch_embed(images)
        cls = self.cls_token.expand(patches.shape[0], -1, -1)
        x = torch.cat([cls, patches], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0])


def left():
    torch.manual_seed(3)
    model = VisionTransformer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    def loss_fn(images, labels):
        logits = model(images)
        return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)

    images, labels = make_batch()
    return stablenum_torch.program(loss_fn, torch.from_numpy(images), torch.from_numpy(labels), model=model)


# ---------------------------------------------------------------- flax linen

class SelfAttention(linen.Module):
    heads: int

    @linen.compact
    def __call__(self, x):
        size = x.shape[-1] // self.heads
        query = linen.DenseGeneral((self.heads, size), name="query")(x)
        key = linen.DenseGeneral((self.heads, size), name="key")(x)
        value = linen.DenseGeneral((self.heads, size), name="value")(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query / np.sqrt(size), key)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return linen.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)


class EncoderBlock(linen.Module):
    def setup(self):
        self.norm1 = linen.LayerNorm()
        self.attn = SelfAttention(HEADS)
        self.norm2 = linen.LayerNorm()
        self.up = linen.Dense(HIDDEN)
        self.down = linen.Dense(DIM)

    def __call__(self, x):
        attended = self.attn(self.norm1(x))
        x = attended + x
        normed = self.norm2(x)
        hidden = linen.gelu(self.up(normed), approximate=False)
        return self.down(hidden) + x


class ViT(linen.Module):
    def setup(self):
        self.embed = linen.Conv(DIM, (PATCH, PATCH), strides=(PATCH, PATCH), padding="VALID")
        self.cls = self.param("cls", linen.initializers.normal(0.02), (DIM,))
        self.positions = self.param("positions", linen.initializers.normal(0.2), (TOKENS, DIM))
        self.blocks = [EncoderBlock() for _ in range(DEPTH)]
        self.norm = linen.LayerNorm()
        self.head = linen.Dense(CLASSES)

    def __call__(self, images):
        grid = self.embed(images)
        patches = grid.reshape(grid.shape[0], -1, DIM) + self.positions[1:]
        cls = jnp.broadcast_to(self.cls + self.positions[0], (grid.shape[0], 1, DIM))
        x = jnp.concatenate([cls, patches], axis=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def smoothed_cross_entropy(logits, labels):
    onehot = jax.nn.one_hot(labels, CLASSES, dtype=logits.dtype)
    targets = onehot * (1.0 - SMOOTHING) + SMOOTHING / CLASSES
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))


def right():
    images, labels = make_batch()
    images = jnp.asarray(images.transpose(0, 2, 3, 1))
    model = ViT()
    params = model.init(jax.random.key(5), images)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(6), len(leaves))
    params = tree.unflatten([leaf + 0.05 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)])

    def loss_fn(params, images, labels):
        logits = model.apply({"params": params}, images)
        return smoothed_cross_entropy(logits, labels)

    return stablenum_jax.program(loss_fn, params, images, jnp.asarray(labels))
