"""Small language model: decoder with rotary embeddings, RMSNorm and SwiGLU. PyTorch original and Equinox port."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, HIDDEN, LAYERS, BASE, IGNORE = 37, 32, 4, 40, 2, 100.0, -100


def make_batch():
    rng = np.random.default_rng(17)
    tokens = rng.integers(0, VOCAB, size=(4, 10))
    labels = tokens.copy()
    labels[0, 7:] = IGNORE
    labels[2, 5:] = IGNORE
    return tokens, labels


# ---------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotary_tables(length, head_dim, like):
    inv_freq = 1.0 / BASE ** (torch.arange(0, head_dim, 2, dtype=like.dtype) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=like.dtype), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, HEADS, d // HEADS).transpose(1, 2) for y in self.qkv(x).split(d, dim=-1))
        cos, sin = rotary_tables(t, d // HEADS, x)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = RMSNorm(DIM), Attention()
        self.norm2, self.mlp = RMSNorm(DIM), SwiGLU()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = RMSNorm(DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def left():
    torch.manual_seed(5)
    model = Decoder()
    with torch.no_grad():
        model.embed.weight.mul_(0.2)
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    tokens, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(tokens, labels):
        logits = model(tokens)[:, :-1]
        targets = labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=IGNORE)

    return stablenum_torch.program(loss_fn, tokens, labels, model=model)


# ---------------------------------------------------------------- Equinox


class Norm(eqx.Module):
    scale: jax.Array
    eps: float = eqx.field(static=True, default=1e-5)

    def __call__(self, x):
        ms = jnp.mean(x * x, axis=-1, keepdims=True)
        return self.scale * x * jax.lax.rsqrt(ms + self.eps)


def apply_rotary(x):
    """x: (heads, length, head_dim), first half rotated against the second."""
    length, head_dim = x.shape[-2:]
    inv_freq = BASE ** (-jnp.arange(0, head_dim, 2) / head_dim)
    theta = jnp.einsum("t,f->tf", jnp.arange(length), inv_freq)
    cos, sin = jnp.cos(theta), jnp.sin(theta)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class CausalAttention(eqx.Module):
    wq: eqx.nn.Linear
    wk: eqx.nn.Linear
    wv: eqx.nn.Linear
    wo: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.wq, self.wk, self.wv, self.wo = (eqx.nn.Linear(DIM, DIM, use_bias=False, key=k) for k in keys)

    def heads(self, projection, x):
        y = jax.vmap(projection)(x)
        return y.reshape(x.shape[0], HEADS, -1).transpose(1, 0, 2)

    def __call__(self, x):
        length, dim = x.shape
        q = apply_rotary(self.heads(self.wq, x))
        k = apply_rotary(self.heads(self.wk, x))
        v = self.heads(self.wv, x)
        scores = jnp.einsum("hqd,hkd->hqk", q * (dim // HEADS) ** -0.5, k)
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(causal, scores, -jnp.inf)
        probs = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("hqk,hkd->qhd", probs, v).reshape(length, dim)
        return jax.vmap(self.wo)(y)


class FeedForward(eqx.Module):
    w1: eqx.nn.Linear
    w2: eqx.nn.Linear
    w3: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.w1 = eqx.nn.Linear(DIM, HIDDEN, use_bias=False, key=k1)
        self.w2 = eqx.nn.Linear(HIDDEN, DIM, use_bias=False, key=k2)
        self.w3 = eqx.nn.Linear(DIM, HIDDEN, use_bias=False, key=k3)

    def __call__(self, x):
        gated = jax.nn.silu(self.w1(x))
        return self.w2(gated * self.w3(x))


class Layer(eqx.Module):
    ln1: Norm
    attention: CausalAttention
    ln2: Norm
    ff: FeedForward

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.ln1 = Norm(1.0 + 0.05 * jax.random.normal(k1, (DIM,)))
        self.ln2 = Norm(1.0 + 0.05 * jax.random.normal(k2, (DIM,)))
        self.attention, self.ff = CausalAttention(k3), FeedForward(k4)

    def __call__(self, x):
        x = x + self.attention(jax.vmap(self.ln1)(x))
        return x + jax.vmap(self.ff)(jax.vmap(self.ln2)(x))


class LanguageModel(eqx.Module):
    table: jax.Array
    layers: list
    ln_f: Norm

    def __init__(self, key):
        k1, k2, *rest = jax.random.split(key, LAYERS + 2)
        self.table = 0.2 * jax.random.normal(k1, (VOCAB, DIM))
        self.ln_f = Norm(1.0 + 0.05 * jax.random.normal(k2, (DIM,)))
        self.layers = [Layer(k) for k in rest]

    def __call__(self, tokens):
        x = self.table[tokens]
        for layer in self.layers:
            x = layer(x)
        hidden = jax.vmap(self.ln_f)(x)
        return hidden @ self.table.T


def next_token_loss(model, tokens, labels):
    logits = jax.vmap(model)(tokens)
    logprobs = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    targets = labels[:, 1:]
    valid = targets != IGNORE
    picked = jnp.take_along_axis(logprobs, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * valid) / jnp.sum(valid)


def right():
    tokens, labels = (jnp.asarray(a) for a in make_batch())
    model = LanguageModel(jax.random.key(31))
    return stablenum_jax.program(next_token_loss, model, tokens, labels)
