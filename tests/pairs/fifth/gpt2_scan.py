"""GPT-2-like decoder: HF-style PyTorch with Conv1D and a tied head; plain JAX with lax.scan over stacked layers."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import jax
import jax.numpy as jnp
import optax

import stablenum_jax
import stablenum_torch

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 40, 12, 32, 4, 3
PEAK, WARMUP = 3e-3, 4


def make_batch():
    rng = np.random.default_rng(5)
    ids = rng.integers(0, VOCAB, size=(4, CONTEXT)).astype(np.int64)
    labels = ids.copy()
    labels[0, :4] = -100
    labels[2, 9:] = -100
    return ids, labels


# ---------------------------------------------------------------- PyTorch

class Conv1D(nn.Module):
    """As in HF's GPT-2: a linear layer whose weight is stored (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.15)
        self.bias = nn.Parameter(torch.randn(nf) * 0.05)

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class GPT2Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(3 * width, width)
        self.c_proj = Conv1D(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(CONTEXT, CONTEXT, dtype=torch.bool))[None, None],
                             persistent=False)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x):
        query, key, value = self.c_attn(x).split(x.shape[-1], dim=2)
        query, key, value = self.split(query), self.split(key), self.split(value)
        w = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(value.size(-1))
        causal = self.bias[:, :, : w.shape[-2], : w.shape[-1]]
        w = torch.where(causal, w, torch.finfo(w.dtype).min)
        w = torch.softmax(w, dim=-1)
        a = torch.matmul(w, value).permute(0, 2, 1, 3).contiguous()
        a = a.view(a.shape[0], a.shape[1], -1)
        return self.c_proj(a)


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = GPT2Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.c_fc = Conv1D(4 * width, width)
        self.act = NewGELU()
        self.c_proj = Conv1D(width, 4 * width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))


class GPT2LMHeadModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        nn.init.normal_(self.wte.weight, std=0.3)
        nn.init.normal_(self.wpe.weight, std=0.1)
        self.h = nn.ModuleList([GPT2Block(WIDTH, HEADS) for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)

    def forward(self, input_ids, labels):
        pos = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        lm_logits = F.linear(x, self.wte.weight)
        shift_logits = lm_logits[..., :-1, :].contiguous()
        shift_labels = labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, VOCAB), shift_labels.view(-1), ignore_index=-100)


def left():
    torch.manual_seed(0)
    model = GPT2LMHeadModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    ids, labels = make_batch()

    def loss_fn(ids, labels):
        return model(ids, labels)

    return stablenum_torch.program(
        loss_fn, torch.tensor(ids), torch.tensor(labels), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX

def init_params(key):
    keys = iter(jax.random.split(key, 8))

    def normal(*shape):
        return 0.02 * jax.random.normal(next(keys), shape)

    d, n = WIDTH, LAYERS
    layers = {
        "ln1": {"g": jnp.ones((n, d)), "b": jnp.zeros((n, d))},
        "wq": normal(n, d, d), "wk": normal(n, d, d), "wv": normal(n, d, d), "wo": normal(n, d, d),
        "bq": jnp.zeros((n, d)), "bk": jnp.zeros((n, d)), "bv": jnp.zeros((n, d)), "bo": jnp.zeros((n, d)),
        "ln2": {"g": jnp.ones((n, d)), "b": jnp.zeros((n, d))},
        "w_up": normal(n, d, 4 * d), "b_up": jnp.zeros((n, 4 * d)),
        "w_down": normal(n, 4 * d, d), "b_down": jnp.zeros((n, d)),
    }
    return {"tok": normal(VOCAB, d), "pos": normal(CONTEXT, d), "layers": layers,
            "ln_f": {"g": jnp.ones((d,)), "b": jnp.zeros((d,))}}


def layer_norm(x, p, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    var = jnp.mean(jnp.square(centred), -1, keepdims=True)
    return centred * jax.lax.rsqrt(var + eps) * p["g"] + p["b"]


def attention(x, p):
    batch, length, d = x.shape

    def heads(w, b):
        return (x @ w + b).reshape(batch, length, HEADS, d // HEADS)

    q, k, v = heads(p["wq"], p["bq"]), heads(p["wk"], p["bk"]), heads(p["wv"], p["bv"])
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) * (d // HEADS) ** -0.5
    steps = jnp.arange(length)
    visible = steps[:, None] >= steps[None, :]
    scores = jnp.where(visible, scores, -1e30)
    probs = jax.nn.softmax(scores)
    mixed = jnp.einsum("bhij,bjhd->bihd", probs, v).reshape(batch, length, d)
    return jnp.einsum("bti,io->bto", mixed, p["wo"]) + p["bo"]


def decoder_layer(x, p):
    x = x + attention(layer_norm(x, p["ln1"]), p)
    up = layer_norm(x, p["ln2"]) @ p["w_up"] + p["b_up"]
    return x + jax.nn.gelu(up, approximate=True) @ p["w_down"] + p["b_down"], None


def logits_of(params, ids):
    x = jnp.take(params["tok"], ids, axis=0) + params["pos"][: ids.shape[1]]
    x, _ = jax.lax.scan(decoder_layer, x, params["layers"])
    x = layer_norm(x, params["ln_f"])
    return jnp.einsum("btd,vd->btv", x, params["tok"])


def lm_loss(params, ids, labels):
    logits = logits_of(params, ids)[:, :-1]
    wanted = labels[:, 1:]
    valid = wanted != -100
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, wanted, 0))
    return jnp.sum(nll * valid) / jnp.sum(valid)


def right():
    params = init_params(jax.random.PRNGKey(0))
    ids, labels = make_batch()
    schedule = optax.linear_schedule(PEAK / WARMUP, PEAK, WARMUP - 1)
    tx = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1)
    return stablenum_jax.program(lm_loss, params, ids, labels, optimizer=tx)
