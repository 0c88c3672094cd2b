"""A small GPT-style language model: the PyTorch original and its flax nnx port."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from flax import nnx

import stablenum_jax
import stablenum_torch

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS, IGNORE = 41, 12, 32, 4, 2, -100
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1

def make_batch():
    rng = np.random.default_rng(7)
    tokens = rng.integers(1, VOCAB, size=(4, 11))
    labels = tokens.copy()
    for row, length in enumerate((11, 8, 10, 6)):
        tokens[row, length:] = 0
        labels[row, length:] = IGNORE
    return tokens.astype(np.int64), labels.astype(np.int64)


# ---------------------------------------------------------------- PyTorch

class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (m.view(B, T, self.heads, C // self.heads).transpose(1, 2) for m in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_out = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        inner = self.c_fc(self.ln_2(x))
        inner = F.gelu(inner)
        return x + self.c_out(inner)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, HEADS) for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
                elif name.startswith("w"):
                    p.mul_(0.4)

    def forward(self, idx):
        pos = torch.arange(idx.shape[1])
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        return x @ self.wte.weight.T


def left():
    torch.manual_seed(1)
    model = GPT()
    tokens, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, labels):
        logits = model(tokens)
        shift_logits = logits[:, :-1].reshape(-1, VOCAB)
        shift_labels = labels[:, 1:].reshape(-1)
        return F.cross_entropy(shift_logits, shift_labels, ignore_index=IGNORE)

    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    return stablenum_torch.program(loss_fn, tokens, labels, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- flax nnx

class Attention(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.head_dim = width // heads
        self.query = nnx.LinearGeneral(width, (heads, self.head_dim), rngs=rngs)
        self.key = nnx.LinearGeneral(width, (heads, self.head_dim), rngs=rngs)
        self.value = nnx.LinearGeneral(width, (heads, self.head_dim), rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, h):
        query = self.query(h) / math.sqrt(self.head_dim)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, self.key(h))
        causal = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, self.value(h))
        merged = mixed.reshape(h.shape)
        return self.out(merged)


class DecoderLayer(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.attn_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.attention = Attention(width, heads, rngs)
        self.mlp_norm = nnx.LayerNorm(width, epsilon=1e-5, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, h):
        attended = self.attention(self.attn_norm(h))
        h = h + attended
        hidden = self.up(self.mlp_norm(h))
        hidden = jax.nn.gelu(hidden, approximate=False)
        return h + self.down(hidden)


class LanguageModel(nnx.Module):
    def __init__(self, rngs):
        self.token_table = nnx.Param(0.4 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.positions = nnx.Param(0.4 * jax.random.normal(rngs.params(), (CONTEXT, WIDTH)))
        self.layers = nnx.List([DecoderLayer(WIDTH, HEADS, rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids):
        h = jnp.take(self.token_table[...], ids, axis=0) + self.positions[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h)
        return jnp.einsum("btc,vc->btv", self.final_norm(h), self.token_table[...])


def next_token_loss(model, ids, labels):
    log_probs = jax.nn.log_softmax(model(ids)[:, :-1], axis=-1)
    following = labels[:, 1:]
    valid = following != IGNORE
    safe = jnp.where(valid, following, 0)
    nll = -jnp.take_along_axis(log_probs, safe[..., None], axis=-1)[..., 0]
    return jnp.sum(nll * valid) / jnp.sum(valid)


def decay_mask(params):
    def is_matrix(path, leaf):
        name = jax.tree_util.keystr(path)
        return any(word in name for word in ("kernel", "token_table", "positions"))
    return jax.tree_util.tree_map_with_path(is_matrix, params)


def right():
    model = LanguageModel(nnx.Rngs(2))
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    leaves = [leaf + 0.05 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    model = nnx.merge(graph, jax.tree.unflatten(treedef, leaves))
    tx = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=WEIGHT_DECAY, mask=decay_mask)
    ids, labels = (jnp.asarray(a) for a in make_batch())
    return stablenum_jax.program(next_token_loss, model, ids, labels, optimizer=tx)
