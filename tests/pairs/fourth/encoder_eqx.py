"""BERT-like sentence classifier: masked self-attention, learned positions, mean pooling."""
import math

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

VOCAB, MAX_LEN, WIDTH, HEADS, LAYERS, CLASSES = 40, 16, 32, 4, 2, 5


def make_batch():
    rng = np.random.default_rng(11)
    lengths = np.array([12, 7, 9, 4])
    tokens = rng.integers(1, VOCAB, size=(4, 12))
    tokens[np.arange(12)[None, :] >= lengths[:, None]] = 0
    labels = rng.integers(0, CLASSES, size=(4,))
    return tokens.astype(np.int32), labels.astype(np.int32)


# ---------------------------------------------------------------- PyTorch


class SelfAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, pad_mask):
        b, t, d = x.shape
        qkv = self.qkv(x).view(b, t, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(pad_mask[:, None, None, :], float("-inf"))
        attn = scores.softmax(dim=-1)
        y = (attn @ v).transpose(1, 2).reshape(b, t, d)
        return self.proj(y)


class EncoderLayer(nn.Module):
    def __init__(self, dim, num_heads, eps=1e-12):
        super().__init__()
        self.attn = SelfAttention(dim, num_heads)
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.norm2 = nn.LayerNorm(dim, eps=eps)

    def forward(self, x, pad_mask):
        x = self.norm1(x + self.attn(x, pad_mask))
        h = F.gelu(self.fc1(x))
        return self.norm2(x + self.fc2(h))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Embedding(MAX_LEN, WIDTH)
        self.emb_norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(WIDTH, HEADS) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.normal_(self.tok_emb.weight, std=0.02)
        nn.init.normal_(self.pos_emb.weight, std=0.02)

    def forward(self, ids):
        pad_mask = ids == 0
        pos = torch.arange(ids.shape[1], device=ids.device)
        h = self.tok_emb(ids) + self.pos_emb(pos)
        h = self.emb_norm(h)
        for layer in self.layers:
            h = layer(h, pad_mask)
        keep = (~pad_mask).unsqueeze(-1).to(h.dtype)
        pooled = (h * keep).sum(dim=1) / keep.sum(dim=1)
        return self.head(pooled)


def param_groups(model, weight_decay):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (no_decay if name.endswith("bias") or "norm" in name else decay).append(p)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


# ---------------------------------------------------------------- JAX


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, width, num_heads, *, rng):
        k1, k2, k3, k4 = jax.random.split(rng, 4)
        self.query = eqx.nn.Linear(width, width, key=k1)
        self.key = eqx.nn.Linear(width, width, key=k2)
        self.value = eqx.nn.Linear(width, width, key=k3)
        self.output = eqx.nn.Linear(width, width, key=k4)
        self.num_heads = num_heads

    def __call__(self, x, valid):
        length, width = x.shape
        split = lambda a: a.reshape(length, self.num_heads, -1)
        query = split(jax.vmap(self.query)(x))
        key = split(jax.vmap(self.key)(x))
        value = split(jax.vmap(self.value)(x))
        query = query / math.sqrt(query.shape[-1])
        logits = jnp.einsum("qhd,khd->hqk", query, key)
        logits = jnp.where(valid[None, None, :], logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits, axis=-1)
        mixed = jnp.einsum("hqk,khd->qhd", weights, value)
        return jax.vmap(self.output)(mixed.reshape(length, width))


class Block(eqx.Module):
    attention: Attention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    output_norm: eqx.nn.LayerNorm

    def __init__(self, width, num_heads, *, rng):
        k1, k2, k3 = jax.random.split(rng, 3)
        self.attention = Attention(width, num_heads, rng=k1)
        self.attention_norm = eqx.nn.LayerNorm(width, eps=1e-12)
        self.up = eqx.nn.Linear(width, 2 * width, key=k2)
        self.down = eqx.nn.Linear(2 * width, width, key=k3)
        self.output_norm = eqx.nn.LayerNorm(width, eps=1e-12)

    def __call__(self, x, valid):
        x = jax.vmap(self.attention_norm)(self.attention(x, valid) + x)

        def feed_forward(token):
            inner = jax.nn.gelu(self.up(token), approximate=False)
            return self.output_norm(token + self.down(inner))

        return jax.vmap(feed_forward)(x)


class Classifier(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: jax.Array
    embedding_norm: eqx.nn.LayerNorm
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, rng):
        k1, k2, k3, *ks = jax.random.split(rng, 3 + LAYERS)
        self.embedding = eqx.nn.Embedding(VOCAB, WIDTH, key=k1)
        self.positions = 0.02 * jax.random.normal(k2, (MAX_LEN, WIDTH))
        self.embedding_norm = eqx.nn.LayerNorm(WIDTH, eps=1e-12)
        self.blocks = [Block(WIDTH, HEADS, rng=k) for k in ks]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=k3)

    def __call__(self, tokens):
        """One sentence: tokens (length,) -> logits (classes,)."""
        valid = tokens != 0
        x = jax.vmap(self.embedding)(tokens)
        x = x + self.positions[: tokens.shape[0]]
        x = jax.vmap(self.embedding_norm)(x)
        for block in self.blocks:
            x = block(x, valid)
        total = jnp.sum(jnp.where(valid[:, None], x, 0.0), axis=0)
        sentence = total / jnp.sum(valid)
        return self.head(sentence)


def decay_mask(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(param_groups(model, 0.05), lr=2e-3, betas=(0.9, 0.98))
    tokens, labels = make_batch()

    def loss_fn(tokens, labels):
        return F.cross_entropy(model(tokens), labels, label_smoothing=0.1)

    return stablenum_torch.program(loss_fn, torch.tensor(tokens).long(), torch.tensor(labels).long(),
                                   model=model, optimizer=optimizer)


def right():
    params = Classifier(jax.random.key(3))
    optimizer = optax.adamw(2e-3, b1=0.9, b2=0.98, weight_decay=0.05, mask=decay_mask)
    tokens, labels = make_batch()

    def loss_fn(params, tokens, labels):
        logits = jax.vmap(params)(tokens)
        targets = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.1)
        return jnp.mean(optax.softmax_cross_entropy(logits, targets))

    return stablenum_jax.program(loss_fn, params, tokens, labels, optimizer=optimizer)
