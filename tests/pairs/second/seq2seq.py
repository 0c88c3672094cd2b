"""Encoder-decoder translation model: the PyTorch original and its port to plain JAX (one sentence pair at a time, vmapped)."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

PAD = 0
SRC_VOCAB, TGT_VOCAB = 19, 23
WIDTH, HEADS, HIDDEN, DEPTH = 16, 4, 24, 2
SRC_LEN, TGT_LEN = 9, 8
SMOOTHING = 0.1


def make_batch():
    rng = np.random.default_rng(11)
    src = rng.integers(3, SRC_VOCAB, size=(3, SRC_LEN))
    tgt = rng.integers(3, TGT_VOCAB, size=(3, TGT_LEN))
    tgt[:, 0] = 1
    for row, (n_src, n_tgt) in enumerate([(9, 8), (6, 5), (4, 7)]):
        src[row, n_src:] = PAD
        tgt[row, n_tgt:] = PAD
    return src, tgt


# ---------------------------------------------------------------- PyTorch


class MultiHeadAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, query, memory, mask):
        projected = self.q_proj(query), self.k_proj(memory), self.v_proj(memory)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, cross):
        super().__init__()
        self.self_attn = MultiHeadAttention(WIDTH, HEADS)
        self.norm1 = nn.LayerNorm(WIDTH)
        if cross:
            self.cross_attn = MultiHeadAttention(WIDTH, HEADS)
            self.norm2 = nn.LayerNorm(WIDTH)
        self.ff = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        self.norm3 = nn.LayerNorm(WIDTH)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.norm1(x + self.self_attn(x, x, mask))
        if memory is not None:
            x = self.norm2(x + self.cross_attn(x, memory, memory_mask))
        return self.norm3(x + self.ff(x))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.src_embed = nn.Embedding(SRC_VOCAB, WIDTH)
        self.tgt_embed = nn.Embedding(TGT_VOCAB, WIDTH)
        self.positions = nn.Embedding(SRC_LEN, WIDTH)
        self.encoder = nn.ModuleList([Layer(cross=False) for _ in range(DEPTH)])
        self.decoder = nn.ModuleList([Layer(cross=True) for _ in range(DEPTH)])
        self.generator = nn.Linear(WIDTH, TGT_VOCAB)

    def embed(self, tokens, table):
        where = torch.arange(tokens.shape[1], device=tokens.device)
        return table(tokens) * math.sqrt(WIDTH) + self.positions(where)

    def forward(self, src, tgt):
        src_mask = (src != PAD)[:, None, None, :]
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).tril()
        tgt_mask = causal & (tgt != PAD)[:, None, None, :]
        memory = self.embed(src, self.src_embed)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        y = self.embed(tgt, self.tgt_embed)
        for layer in self.decoder:
            y = layer(y, tgt_mask, memory, src_mask)
        return self.generator(y)


def left():
    torch.manual_seed(0)
    model = Translator()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5).add_(0.1 * torch.randn_like(p))
    src, tgt = (torch.as_tensor(part) for part in make_batch())

    def loss_fn(src, tgt):
        logits = model(src, tgt[:, :-1])
        labels = tgt[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING)

    return stablenum_torch.program(loss_fn, src, tgt, model=model)


# ---------------------------------------------------------------- JAX


def init_params(seed):
    rng = np.random.default_rng(seed)

    def normal(*shape, std=0.2):
        return jnp.asarray(rng.normal(0.0, std, shape), jnp.float32)

    def dense(n_in, n_out):
        return {"w": normal(n_in, n_out), "b": normal(n_out, std=0.1)}

    def norm():
        return {"gain": 1.0 + normal(WIDTH, std=0.1), "bias": normal(WIDTH, std=0.1)}

    def heads():
        return {"q": dense(WIDTH, WIDTH), "kv": dense(WIDTH, 2 * WIDTH), "out": dense(WIDTH, WIDTH)}

    def layer():
        return {"self_attn": heads(), "norm1": norm(), "up": dense(WIDTH, HIDDEN), "down": dense(HIDDEN, WIDTH), "norm3": norm()}

    return {
        "src_embed": normal(SRC_VOCAB, WIDTH),
        "tgt_embed": normal(TGT_VOCAB, WIDTH),
        "positions": normal(SRC_LEN, WIDTH),
        "encoder": [layer() for _ in range(DEPTH)],
        "decoder": [layer() | {"cross_attn": heads(), "norm2": norm()} for _ in range(DEPTH)],
        "generator": dense(WIDTH, TGT_VOCAB),
    }


def linear(p, x):
    return x @ p["w"] + p["b"]


def layer_norm(p, x, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + eps) * p["gain"] + p["bias"]


def attention(p, x, memory, mask):
    """One sequence: x is (queries, width), memory (keys, width), mask broadcastable to (queries, keys)."""
    k, v = jnp.split(linear(p["kv"], memory), 2, axis=-1)
    q, k, v = (a.reshape(a.shape[0], HEADS, WIDTH // HEADS) for a in (linear(p["q"], x), k, v))
    scores = jnp.einsum("qhd,khd->hqk", q / math.sqrt(q.shape[-1]), k)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    weights = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("hqk,khd->qhd", weights, v)
    return linear(p["out"], mixed.reshape(x.shape))


def embed(table, positions, tokens):
    return table[tokens] * WIDTH**0.5 + positions[: tokens.shape[0]]


def run_layer(p, x, mask, memory=None, memory_mask=None):
    x = layer_norm(p["norm1"], x + attention(p["self_attn"], x, x, mask))
    if memory is not None:
        x = layer_norm(p["norm2"], x + attention(p["cross_attn"], x, memory, memory_mask))
    return layer_norm(p["norm3"], x + linear(p["down"], jax.nn.relu(linear(p["up"], x))))


def translate(params, src, tgt):
    """The logits of one sentence pair."""
    steps = jnp.arange(tgt.shape[0])
    src_visible = (src != PAD)[None, :]
    tgt_visible = (steps[:, None] >= steps) & (tgt != PAD)
    memory = embed(params["src_embed"], params["positions"], src)
    for p in params["encoder"]:
        memory = run_layer(p, memory, src_visible)
    x = embed(params["tgt_embed"], params["positions"], tgt)
    for p in params["decoder"]:
        x = run_layer(p, x, tgt_visible, memory, src_visible)
    return linear(params["generator"], x)


def sentence_loss(params, src, tgt):
    log_probs = jax.nn.log_softmax(translate(params, src, tgt[:-1]))
    labels = tgt[1:]
    nll = -jnp.take_along_axis(log_probs, labels[:, None], axis=-1)[:, 0]
    smooth = -log_probs.mean(axis=-1)
    per_token = (1.0 - SMOOTHING) * nll + SMOOTHING * smooth
    valid = labels != PAD
    return jnp.sum(per_token * valid), jnp.sum(valid)


def right():
    params = init_params(1)
    src, tgt = (jnp.asarray(part) for part in make_batch())

    def loss_fn(params, src, tgt):
        totals, counts = jax.vmap(sentence_loss, in_axes=(None, 0, 0))(params, src, tgt)
        return totals.sum() / counts.sum()

    return stablenum_jax.program(loss_fn, params, src, tgt)
