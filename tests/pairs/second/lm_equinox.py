"""A decoder-only language model (RMSNorm, SwiGLU, rotary, grouped queries): PyTorch and its port to equinox."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_jax
import stablenum_torch

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, DEPTH = 37, 32, 4, 2, 8, 40, 2
THETA, EPS = 10000.0, 1e-5


def make_batch():
    rng = np.random.default_rng(21)
    tokens = rng.integers(1, VOCAB, size=(3, 10))
    tokens[:, 4] = tokens[:, 1]
    labels = np.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    for row, length in enumerate((10, 7, 8)):
        labels[row, length - 1:] = -100
        tokens[row, length:] = 0
    return tokens, labels


# ---------------------------------------------------------------- PyTorch

def rotary_tables(length, like):
    inverse = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=like.dtype) / HEAD_DIM)
    angles = torch.outer(torch.arange(length, dtype=like.dtype), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm = nn.RMSNorm(DIM, eps=EPS)
        self.attn = Attention()
        self.mlp_norm = nn.RMSNorm(DIM, eps=EPS)
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x, cos, sin):
        y = self.attn_norm(x)
        x = x + self.attn(y, cos, sin)
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(DEPTH)])
        self.norm = nn.RMSNorm(DIM, eps=EPS)

    def forward(self, tokens):
        x = self.embed(tokens)
        cos, sin = rotary_tables(tokens.shape[1], x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed.weight)


def left():
    torch.manual_seed(4)
    model = LanguageModel()
    with torch.no_grad():
        model.embed.weight.mul_(0.3)
        for scale in (p for p in model.parameters() if p.ndim == 1):
            scale.add_(0.1 * torch.randn_like(scale))

    def loss_fn(tokens, labels):
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    tokens, labels = make_batch()
    return stablenum_torch.program(loss_fn, torch.from_numpy(tokens), torch.from_numpy(labels), model=model)


# ---------------------------------------------------------------- equinox

@jax.custom_vjp
def lookup(table, tokens):
    return table[tokens]


def lookup_fwd(table, tokens):
    return table[tokens], (table, tokens)


def lookup_bwd(residual, cotangent):
    table, tokens = residual
    return jnp.zeros_like(table).at[tokens].add(cotangent), None


lookup.defvjp(lookup_fwd, lookup_bwd)


class RootNorm(eqx.Module):
    scale: jax.Array

    def __call__(self, x):
        mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x / jnp.sqrt(mean_square + EPS) * self.scale


def rotate(x, angles):
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class GroupedAttention(eqx.Module):
    wqkv: jax.Array
    wo: jax.Array

    def __call__(self, x, angles):
        heads = (x @ self.wqkv).reshape(x.shape[0], -1, HEAD_DIM)
        q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
        q, k = rotate(q, angles) * HEAD_DIM**-0.5, rotate(k, angles)
        k = jnp.repeat(k, HEADS // KV_HEADS, axis=1)
        v = jnp.repeat(v, HEADS // KV_HEADS, axis=1)
        causal = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), dtype=bool))
        scores = jnp.where(causal, jnp.einsum("qhd,khd->hqk", q, k), -1e9)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)
        return mixed.reshape(x.shape[0], -1) @ self.wo


class Layer(eqx.Module):
    attn_norm: RootNorm
    attn: GroupedAttention
    mlp_norm: RootNorm
    gate_up: jax.Array
    down: jax.Array

    def __call__(self, x, angles):
        x = x + self.attn(self.attn_norm(x), angles)
        gate, up = jnp.split(self.mlp_norm(x) @ self.gate_up, 2, axis=-1)
        return x + (up * gate * jax.nn.sigmoid(gate)) @ self.down


class Decoder(eqx.Module):
    table: jax.Array
    layers: list
    norm: RootNorm

    def sequence(self, x):
        inverse = 1.0 / THETA ** (jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = jnp.arange(x.shape[0])[:, None] * inverse
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)

    def __call__(self, tokens):
        states = jax.vmap(self.sequence)(lookup(self.table, tokens))
        return jnp.einsum("btd,vd->btv", states, self.table)


def init_decoder(seed):
    rng = np.random.default_rng(seed)

    def normal(*shape, mean=0.0):
        return jnp.asarray(rng.normal(mean, 0.2, size=shape), jnp.float32)

    def layer():
        attention = GroupedAttention(normal(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM), normal(HEADS * HEAD_DIM, DIM))
        gate_up, down = normal(DIM, 2 * HIDDEN), normal(HIDDEN, DIM)
        return Layer(RootNorm(normal(DIM, mean=1.0)), attention, RootNorm(normal(DIM, mean=1.0)), gate_up, down)

    return Decoder(normal(VOCAB, DIM), [layer() for _ in range(DEPTH)], RootNorm(normal(DIM, mean=1.0)))


def loss_fn(model, tokens, labels):
    logits = model(tokens)
    valid = labels >= 0
    picked = jnp.take_along_axis(logits, jnp.where(valid, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    return jnp.sum(losses * valid) / jnp.sum(valid)


def right():
    tokens, labels = make_batch()
    return stablenum_jax.program(loss_fn, init_decoder(9), jnp.asarray(tokens), jnp.asarray(labels))
