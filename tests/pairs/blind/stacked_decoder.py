"""Decoder-only language model with interleaved rotary embeddings and grouped key/value heads.

The torch model multiplies complex numbers for the rotation and keeps its layers in a ModuleList; the JAX
model rotates pairs of reals and scans over parameters stacked along a leading layer axis.
"""
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB, DIM, Q_HEADS, KV_HEADS, FFN, DEPTH = 29, 32, 4, 2, 48, 3
HEAD = DIM // Q_HEADS
PAD = 0


def text_batch():
    rng = np.random.default_rng(55)
    tokens = rng.integers(1, VOCAB, size=(4, 9))
    for i, n in enumerate((9, 6, 8, 7)):
        tokens[i, n:] = PAD
    return tokens


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.empty(DIM).uniform_(0.7, 1.3))

    def forward(self, x):
        return F.normalize(x, dim=-1, eps=0.0) * DIM**0.5 * self.g


class GroupedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(DIM, Q_HEADS * HEAD, bias=False)
        self.wkv = nn.Linear(DIM, 2 * KV_HEADS * HEAD, bias=False)
        self.wo = nn.Linear(Q_HEADS * HEAD, DIM, bias=False)

    def rotate(self, x):
        t = x.shape[1]
        freqs = 500.0 ** (-torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
        angle = torch.outer(torch.arange(t, dtype=x.dtype), freqs)[None, :, None, :]
        rotor = torch.polar(torch.ones_like(angle), angle)
        z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(z * rotor).flatten(-2)

    def forward(self, x):
        b, t, _ = x.shape
        q = self.rotate(self.wq(x).view(b, t, Q_HEADS, HEAD))
        k, v = self.wkv(x).view(b, t, 2 * KV_HEADS, HEAD).chunk(2, dim=2)
        k = self.rotate(k).repeat_interleave(Q_HEADS // KV_HEADS, dim=2)
        v = v.repeat_interleave(Q_HEADS // KV_HEADS, dim=2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / HEAD**0.5
        scores = scores + torch.full((t, t), float("-inf")).triu(1).to(x.dtype)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
        return self.wo(out.flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = RMSNorm(), RMSNorm()
        self.attn = GroupedAttention()
        self.gate_up = nn.Linear(DIM, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        gate, up = self.gate_up(self.n2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([DecoderLayer() for _ in range(DEPTH)])
        self.norm = RMSNorm()
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def left():
    torch.manual_seed(2)
    lm = LM()

    def loss_fn(tokens):
        logits = lm(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1), ignore_index=PAD)

    return stablenum_torch.program(loss_fn, torch.from_numpy(text_batch()), model=lm)


def rms(x, g):
    return x * g / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True))


def rotate_pairs(x):
    """x: (time, heads, head)"""
    position = jnp.arange(x.shape[0], dtype=x.dtype)
    theta = position[:, None, None] / 500.0 ** (jnp.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([even * jnp.cos(theta) - odd * jnp.sin(theta), odd * jnp.cos(theta) + even * jnp.sin(theta)], -1)
    return turned.reshape(x.shape)


def layer_step(x, layer):
    t = x.shape[0]
    h = rms(x, layer["n1"])
    q = rotate_pairs((h @ layer["wq"]).reshape(t, Q_HEADS, HEAD)).reshape(t, KV_HEADS, -1, HEAD) / np.sqrt(HEAD)
    k = rotate_pairs((h @ layer["wk"]).reshape(t, KV_HEADS, HEAD))
    v = (h @ layer["wv"]).reshape(t, KV_HEADS, HEAD)
    scores = jnp.einsum("ingd,jnd->ngij", q, k)
    visible = jnp.arange(t)[:, None] >= jnp.arange(t)[None, :]
    scores = jnp.where(visible, scores, -jnp.inf)
    x = x + jnp.einsum("ngij,jnd->ingd", jax.nn.softmax(scores), v).reshape(t, -1) @ layer["wo"]
    h = rms(x, layer["n2"])
    return x + (jax.nn.silu(h @ layer["w_gate"]) * (h @ layer["w_up"])) @ layer["w_down"], None


def sequence_logits(params, tokens):
    x, _ = jax.lax.scan(layer_step, params["tok"][tokens], params["layers"])
    return rms(x, params["norm"]) @ params["head"]


def lm_loss(params, tokens):
    logits = jax.vmap(sequence_logits, in_axes=(None, 0))(params, tokens[:, :-1])
    labels = tokens[:, 1:]
    true_logit = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - true_logit
    return jnp.mean(nll, where=labels != PAD)


def right():
    rng = np.random.default_rng(1001)
    shapes = dict(wq=(DIM, DIM), wk=(DIM, KV_HEADS * HEAD), wv=(DIM, KV_HEADS * HEAD), wo=(DIM, DIM))
    shapes |= dict(w_gate=(DIM, FFN), w_up=(DIM, FFN), w_down=(FFN, DIM))
    layers = {name: rng.normal(scale=0.15, size=(DEPTH, *shape)) for name, shape in shapes.items()}
    layers |= {name: rng.uniform(0.7, 1.3, size=(DEPTH, DIM)) for name in ("n1", "n2")}
    params = {"tok": rng.normal(size=(VOCAB, DIM)), "layers": layers, "norm": rng.uniform(0.7, 1.3, size=DIM)}
    params["head"] = rng.normal(scale=0.15, size=(DIM, VOCAB))
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    return stablenum_jax.program(lm_loss, params, jnp.asarray(text_batch()))
