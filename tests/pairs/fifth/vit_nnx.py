"""A small ViT classifier: timm-like PyTorch original, flax.nnx port (NHWC, per-head projections)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import stablenum_jax
import stablenum_torch

DIM, HEADS, DEPTH, PATCH, SIZE, CLASSES = 32, 4, 2, 4, 12, 10
SMOOTHING = 0.1


def make_batch():
    rng = np.random.default_rng(11)
    images = rng.normal(size=(6, 3, SIZE, SIZE)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=(6,)).astype(np.int64)
    return images, labels


# ---------------------------------------------------------------- PyTorch

class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        return self.fc2(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, kernel_size=PATCH, stride=PATCH)
        tokens = (SIZE // PATCH) ** 2 + 1
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM) * 0.5)
        self.pos_embed = nn.Parameter(torch.randn(1, tokens, DIM) * 0.2)
        self.blocks = nn.ModuleList([Block(DIM, HEADS) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.pos_embed
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0])


class LabelSmoothingLoss(nn.Module):
    def __init__(self, classes, smoothing):
        super().__init__()
        self.classes = classes
        self.smoothing = smoothing

    def forward(self, logits, target):
        logp = logits.log_softmax(dim=-1)
        with torch.no_grad():
            off = self.smoothing / self.classes
            true_dist = torch.full_like(logp, off)
            true_dist.scatter_(1, target.unsqueeze(1), 1.0 - self.smoothing + off)
        return torch.mean(torch.sum(-true_dist * logp, dim=-1))


def left():
    torch.manual_seed(0)
    model = VisionTransformer()
    decay, no_decay = [], []
    for name, param in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            no_decay.append(param)
        else:
            decay.append(param)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": no_decay, "weight_decay": 0.0}], lr=2e-3)
    criterion = LabelSmoothingLoss(CLASSES, SMOOTHING)
    images, labels = make_batch()

    def loss_fn(images, labels):
        return criterion(model(images), labels)

    return stablenum_torch.program(
        loss_fn, torch.tensor(images), torch.tensor(labels), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (nnx)

class SelfAttention(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        size = width // heads
        self.scale = size ** -0.5
        self.query = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.key = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.value = nnx.LinearGeneral(width, (heads, size), rngs=rngs)
        self.out = nnx.LinearGeneral((heads, size), width, axis=(-2, -1), rngs=rngs)

    def __call__(self, tokens):
        query = self.query(tokens) * self.scale
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, self.key(tokens))
        probs = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", probs, self.value(tokens))
        return self.out(mixed)


class EncoderLayer(nnx.Module):
    def __init__(self, width, heads, *, rngs):
        self.ln_attn = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.attention = SelfAttention(width, heads, rngs=rngs)
        self.ln_mlp = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, tokens):
        tokens = self.attention(self.ln_attn(tokens)) + tokens
        inner = self.up(self.ln_mlp(tokens))
        inner = jax.nn.gelu(inner, approximate=False)
        return self.down(inner) + tokens


class ViT(nnx.Module):
    def __init__(self, *, rngs):
        self.embedding = nnx.Conv(3, DIM, kernel_size=(PATCH, PATCH), strides=(PATCH, PATCH),
                                  padding="VALID", rngs=rngs)
        count = (SIZE // PATCH) ** 2 + 1
        self.cls = nnx.Param(jnp.zeros((1, 1, DIM)))
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, count, DIM)) * 0.02)
        self.layers = nnx.List([EncoderLayer(DIM, HEADS, rngs=rngs) for _ in range(DEPTH)])
        self.final_norm = nnx.LayerNorm(DIM, epsilon=1e-6, rngs=rngs)
        self.classifier = nnx.Linear(DIM, CLASSES, rngs=rngs)

    def __call__(self, pixels):
        patches = self.embedding(pixels)
        batch, rows, cols, width = patches.shape
        tokens = patches.reshape(batch, rows * cols, width)
        first = jnp.broadcast_to(self.cls[...], (batch, 1, width))
        tokens = jnp.concatenate([first, tokens], axis=1) + self.position[...]
        for layer in self.layers:
            tokens = layer(tokens)
        pooled = tokens[:, 0]
        return self.classifier(self.final_norm(pooled))


def decay_mask(params):
    def decayed(path, leaf):
        name = jax.tree_util.keystr(path)
        return "bias" not in name and "scale" not in name
    return jax.tree_util.tree_map_with_path(decayed, params)


def right():
    model = ViT(rngs=nnx.Rngs(0))
    images, labels = make_batch()

    def loss_fn(model, images, labels):
        logits = model(jnp.transpose(images, (0, 2, 3, 1)))
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean()

    tx = optax.adamw(2e-3, weight_decay=0.3, mask=decay_mask)
    return stablenum_jax.program(loss_fn, model, images, labels, optimizer=tx)
