"""A small BERT with tied masked-token head, padding mask and two micro-batches: PyTorch and equinox."""
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

VOCAB, DIM, HEADS, INNER, LAYERS, LENGTH, BATCH, MICRO = 40, 32, 4, 48, 2, 12, 6, 2
PAD, MASK = 0, 3
LR, WEIGHT_DECAY = 0.01, 0.05


def make_batch():
    rng = np.random.default_rng(5)
    tokens = rng.integers(4, VOCAB, size=(BATCH, LENGTH)).astype(np.int64)
    segments = (np.arange(LENGTH)[None] >= np.array([5, 6, 4, 7, 3, 5])[:, None]).astype(np.int64)
    lengths = np.array([12, 9, 7, 11, 6, 10])
    mask = np.arange(LENGTH)[None] < lengths[:, None]
    labels = np.full((BATCH, LENGTH), -100, dtype=np.int64)
    for row, chosen in enumerate([(1, 4, 6, 9), (2,), (0, 5), (3, 7, 10), (1, 4), (2, 3, 8)]):
        for column in chosen:
            labels[row, column] = tokens[row, column]
            tokens[row, column] = MASK
    tokens[~mask] = PAD
    return tokens, segments, mask, labels


# ---------------------------------------------------------------- PyTorch

class BertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(LENGTH, DIM)
        self.segment = nn.Embedding(2, DIM)
        self.norm = nn.LayerNorm(DIM, eps=1e-12)

    def forward(self, tokens, segments):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.norm(self.word(tokens) + self.position(positions) + self.segment(segments))


class BertSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM)
        self.dense = nn.Linear(DIM, DIM)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], HEADS, DIM // HEADS).permute(0, 2, 1, 3)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.dense(context.permute(0, 2, 1, 3).flatten(2))


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = BertSelfAttention()
        self.attention_norm = nn.LayerNorm(DIM, eps=1e-12)
        self.up = nn.Linear(DIM, INNER)
        self.down = nn.Linear(INNER, DIM)
        self.output_norm = nn.LayerNorm(DIM, eps=1e-12)

    def forward(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask))
        return self.output_norm(x + self.down(F.gelu(self.up(x))))


class BertForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.layer = nn.ModuleList(BertLayer() for _ in range(LAYERS))
        self.transform = nn.Linear(DIM, DIM)
        self.transform_norm = nn.LayerNorm(DIM, eps=1e-12)
        self.decoder = nn.Linear(DIM, VOCAB)
        self.apply(self._init)
        self.decoder.weight = self.embeddings.word.weight

    @staticmethod
    def _init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.15)

    def forward(self, tokens, segments, mask):
        x = self.embeddings(tokens, segments)
        for layer in self.layer:
            x = layer(x, mask)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


def left():
    torch.manual_seed(0)
    model = BertForMaskedLM()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=LR, eps=(1e-15, 1e-3), d=1.0, weight_decay=WEIGHT_DECAY)
    batch = make_batch()

    def loss_fn(tokens, segments, mask, labels):
        # two micro-batches, normalised by the number of masked tokens of the whole batch
        count = (labels != -100).sum()
        total = 0.0
        for t, s, m, y in zip(*(a.chunk(MICRO) for a in (tokens, segments, mask, labels))):
            logits = model(t, s, m)
            total = total + F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1), ignore_index=-100, reduction="sum") / count
        return total

    return stablenum_torch.program(loss_fn, *(torch.tensor(a) for a in batch), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (equinox: one sequence, then vmap)

class Attention(eqx.Module):
    wq: eqx.nn.Linear
    wk: eqx.nn.Linear
    wv: eqx.nn.Linear
    wo: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, key):
        a, b, c, d = jax.random.split(key, 4)
        self.wq = eqx.nn.Linear(DIM, DIM, key=a)
        self.wk = eqx.nn.Linear(DIM, DIM, use_bias=False, key=b)
        self.wv = eqx.nn.Linear(DIM, DIM, key=c)
        self.wo = eqx.nn.Linear(DIM, DIM, key=d)
        self.heads = HEADS

    def __call__(self, x, mask):
        length, dim = x.shape
        q = jax.vmap(self.wq)(x).reshape(length, self.heads, -1)
        k = jax.vmap(self.wk)(x).reshape(length, self.heads, -1)
        v = jax.vmap(self.wv)(x).reshape(length, self.heads, -1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        bias = jnp.where(mask, 0.0, -1e9)
        probs = jax.nn.softmax(scores + bias[None, None, :], axis=-1)
        context = jnp.einsum("hqk,khd->qhd", probs, v).reshape(length, dim)
        return jax.vmap(self.wo)(context)


class EncoderLayer(eqx.Module):
    attention: Attention
    norm1: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.attention = Attention(a)
        self.norm1 = eqx.nn.LayerNorm(DIM, eps=1e-12)
        self.up = eqx.nn.Linear(DIM, INNER, key=b)
        self.down = eqx.nn.Linear(INNER, DIM, key=c)
        self.norm2 = eqx.nn.LayerNorm(DIM, eps=1e-12)

    def __call__(self, x, mask):
        x = jax.vmap(self.norm1)(x + self.attention(x, mask))

        def feed_forward(token):
            return self.norm2(token + self.down(jax.nn.gelu(self.up(token), approximate=False)))

        return jax.vmap(feed_forward)(x)


class MaskedLM(eqx.Module):
    word: eqx.nn.Embedding
    position: jax.Array
    segment: jax.Array
    norm: eqx.nn.LayerNorm
    layers: list
    head: eqx.nn.Linear
    head_norm: eqx.nn.LayerNorm
    head_bias: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 4)
        self.word = eqx.nn.Embedding(VOCAB, DIM, key=keys[0])
        self.position = jax.random.normal(keys[1], (LENGTH, DIM)) * 0.15
        self.segment = jax.random.normal(keys[2], (2, DIM)) * 0.15
        self.norm = eqx.nn.LayerNorm(DIM, eps=1e-12)
        self.layers = [EncoderLayer(k) for k in keys[4:]]
        self.head = eqx.nn.Linear(DIM, DIM, key=keys[3])
        self.head_norm = eqx.nn.LayerNorm(DIM, eps=1e-12)
        self.head_bias = jnp.zeros(VOCAB)

    def __call__(self, tokens, segments, mask):
        x = self.word.weight[tokens] + self.segment[segments] + self.position
        x = jax.vmap(self.norm)(x)
        for layer in self.layers:
            x = layer(x, mask)
        x = jax.nn.gelu(jax.vmap(self.head)(x), approximate=False)
        x = jax.vmap(self.head_norm)(x)
        table = self.word.weight
        return x @ table.T + self.head_bias


def token_losses(logits, labels):
    valid = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, labels, 0))
    return jnp.sum(losses * valid), jnp.sum(valid)


def right():
    model = MaskedLM(jax.random.key(0))
    optimizer = optax.adafactor(LR, min_dim_size_to_factor=1, clipping_threshold=1.0, weight_decay_rate=LR * WEIGHT_DECAY)
    batch = make_batch()

    def loss_fn(model, tokens, segments, mask, labels):
        micro = jax.tree.map(lambda a: a.reshape(MICRO, BATCH // MICRO, *a.shape[1:]), (tokens, segments, mask, labels))

        def accumulate(carry, part):
            loss_sum, count = carry
            t, s, m, y = part
            logits = jax.vmap(model)(t, s, m)
            loss, n = token_losses(logits, y)
            return (loss_sum + loss, count + n), None

        (loss_sum, count), _ = jax.lax.scan(accumulate, (0.0, 0), micro)
        return loss_sum / count

    return stablenum_jax.program(loss_fn, model, *batch, optimizer=optimizer)
