"""A llama-style decoder with a value head: PyTorch modules, and the same in plain JAX (nested dicts and functions)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

CFG = dict(vocab=37, dim=32, heads=4, ffn=40, layers=2, base=10000.0, value_coef=0.25)
LR, BETAS, EPS, DECAY = 3e-3, (0.9, 0.95), 1e-6, 0.1


def rollout():
    rng = np.random.default_rng(99)
    tokens = rng.integers(0, CFG["vocab"], size=(3, 11)).astype(np.int64)
    return tokens, rng.normal(size=(3, 10)).astype(np.float32)


# --------------------------------------------------------------------------- original
def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotary_tables(length, head_dim, base, like):
    inv_freq = base ** (-torch.arange(0, head_dim, 2, dtype=like.dtype) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=like.dtype), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class DecoderBlock(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.attn_norm = nn.RMSNorm(dim, eps=1e-6)
        self.attn = CausalAttention(dim, heads)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-6)
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attn(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, ffn, layers, base, **_):
        super().__init__()
        self.head_dim, self.base = dim // heads, base
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([DecoderBlock(dim, heads, ffn) for _ in range(layers)])
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.value_head = nn.Linear(dim, 1)
        nn.init.normal_(self.embed.weight, std=0.15)
        for name, p in self.named_parameters():
            if "norm" in name:
                nn.init.normal_(p, mean=1.0, std=0.1)

    def forward(self, tokens):
        x = self.embed(tokens) * self.embed.embedding_dim**0.5
        cos, sin = rotary_tables(tokens.shape[1], self.head_dim, self.base, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        h = self.norm(x)
        values = self.value_head(h.detach()).squeeze(-1)
        return F.linear(h, self.embed.weight), values


def left():
    torch.manual_seed(8)
    policy = Decoder(**CFG)

    def loss_fn(tokens, returns):
        logits, values = policy(tokens[:, :-1])
        lm_loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        return lm_loss + CFG["value_coef"] * F.mse_loss(values, returns)

    adam = torch.optim.AdamW(policy.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return stablenum_torch.program(loss_fn, *map(torch.from_numpy, rollout()), model=policy, optimizer=adam)


# --------------------------------------------------------------------------- port
def rms_norm(x, gain):
    inv_rms = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x * inv_rms * gain


def rope(x):
    t, d = x.shape[1], x.shape[-1]
    freq = CFG["base"] ** (-jnp.arange(0, d, 2).astype(x.dtype) / d)
    theta = jnp.arange(t).astype(x.dtype)[:, None] * freq[None, :]
    c, s = jnp.cos(theta)[:, None, :], jnp.sin(theta)[:, None, :]
    lo, hi = x[..., : d // 2], x[..., d // 2 :]
    return jnp.concatenate([lo * c - hi * s, hi * c + lo * s], axis=-1)


def attention(p, x):
    b, t, d = x.shape
    heads = (b, t, CFG["heads"], d // CFG["heads"])
    q = rope((x @ p["wq"]).reshape(heads))
    k = rope((x @ p["wk"]).reshape(heads))
    v = (x @ p["wv"]).reshape(heads)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * heads[-1] ** -0.5
    causal = jnp.tril(jnp.ones((t, t), dtype=bool))
    scores = jnp.where(causal, scores, jnp.finfo(scores.dtype).min)
    y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)
    return y.reshape(b, t, d) @ p["wo"]


def feed_forward(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def decode(params, tokens):
    x = params["embed"][tokens] * CFG["dim"] ** 0.5
    for p in params["blocks"]:
        x = x + attention(p["attn"], rms_norm(x, p["attn_norm"]))
        x = x + feed_forward(p["ffn"], rms_norm(x, p["ffn_norm"]))
    h = rms_norm(x, params["norm"])
    frozen = jax.lax.stop_gradient(h)
    values = frozen @ params["value"]["w"] + params["value"]["b"]
    return h @ params["embed"].T, values


def objective(params, tokens, returns):
    logits, values = decode(params, tokens[:, :-1])
    logp = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)
    return -picked.mean() + CFG["value_coef"] * jnp.square(values - returns).mean()


def init_params(seed):
    rng = np.random.default_rng(seed)
    dim, ffn = CFG["dim"], CFG["ffn"]

    def normal(*shape, mean=0.0, std=0.15):
        return jnp.asarray(rng.normal(mean, std, size=shape), dtype=jnp.float32)

    def block():
        return {
            "attn_norm": normal(dim, mean=1.0, std=0.1),
            "attn": {name: normal(dim, dim) for name in ("wq", "wk", "wv", "wo")},
            "ffn_norm": normal(dim, mean=1.0, std=0.1),
            "ffn": {"gate": normal(dim, ffn), "up": normal(dim, ffn), "down": normal(ffn, dim)},
        }

    return {
        "embed": normal(CFG["vocab"], dim),
        "blocks": [block() for _ in range(CFG["layers"])],
        "norm": normal(dim, mean=1.0, std=0.1),
        "value": {"w": normal(dim), "b": normal()},
    }


def right():
    adam = optax.scale_by_adam(*BETAS, eps=EPS)
    optimizer = optax.chain(adam, optax.add_decayed_weights(DECAY), optax.scale(-LR))
    return stablenum_jax.program(objective, init_params(77), *map(jnp.asarray, rollout()), optimizer=optimizer)
