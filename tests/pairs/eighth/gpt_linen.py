"""A small GPT: nanoGPT-like in PyTorch, flax.linen with DenseGeneral heads in JAX.

Both sides accumulate over two microbatches and normalise by the number of targets in the whole batch.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB, BLOCK, DIM, HEADS, LAYERS = 29, 12, 24, 3, 2
ACCUM, IGNORE = 2, -100
PEAK, FLOOR, WARMUP, TOTAL = 3e-3, 3e-4, 10, 200


def make_batch():
    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB, (4, BLOCK + 1))
    x, y = text[:, :-1].copy(), text[:, 1:].copy()
    for row, length in enumerate((12, 7, 10, 12)):
        y[row, length:] = IGNORE
    return x.astype(np.int32), y.astype(np.int32)


# ------------------------------------------------------------------ PyTorch


class CausalSelfAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = torch.nn.Linear(DIM, 3 * DIM)
        self.c_proj = torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(DIM, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = torch.nn.Linear(DIM, 4 * DIM)
        self.gelu = torch.nn.GELU(approximate="tanh")
        self.c_proj = torch.nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = torch.nn.LayerNorm(DIM)
        self.attn = CausalSelfAttention()
        self.ln_2 = torch.nn.LayerNorm(DIM)
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(VOCAB, DIM)
        self.wpe = torch.nn.Embedding(BLOCK, DIM)
        self.h = torch.nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f = torch.nn.LayerNorm(DIM)
        self.lm_head = torch.nn.Linear(DIM, VOCAB, bias=False)
        torch.nn.init.normal_(self.wte.weight, std=0.1)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def configure(model):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decay, "weight_decay": 0.1},
        {"params": no_decay, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)

    def factor(step):
        if step < WARMUP:
            return (step + 1) / (WARMUP + 1)
        ratio = (step - WARMUP) / (TOTAL - WARMUP)
        low = FLOOR / PEAK
        return low + 0.5 * (1 - low) * (1 + math.cos(math.pi * ratio))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ------------------------------------------------------------------ JAX


class DecoderLayer(nn.Module):
    heads: int
    hidden: int

    @nn.compact
    def __call__(self, x, mask):
        width = x.shape[-1]
        head_dim = width // self.heads
        h = nn.LayerNorm(epsilon=1e-5, name="attention_norm")(x)
        query = nn.DenseGeneral((self.heads, head_dim), name="query")(h)
        key = nn.DenseGeneral((self.heads, head_dim), name="key")(h)
        value = nn.DenseGeneral((self.heads, head_dim), name="value")(h)
        scores = jnp.einsum("...qhd,...khd->...hqk", query, key) * head_dim**-0.5
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        context = jnp.einsum("...hqk,...khd->...qhd", nn.softmax(scores), value)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), name="out")(context)
        h = nn.LayerNorm(epsilon=1e-5, name="mlp_norm")(x)
        h = nn.gelu(nn.Dense(self.hidden, name="up")(h))
        return x + nn.Dense(width, name="down")(h)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        length = tokens.shape[-1]
        embed = nn.Embed(VOCAB, DIM, name="embed")
        positions = self.param("positions", nn.initializers.normal(0.02), (BLOCK, DIM))
        x = embed(tokens) + positions[:length]
        mask = jnp.tril(jnp.ones((length, length), dtype=bool))
        for i in range(LAYERS):
            x = DecoderLayer(HEADS, 4 * DIM, name=f"layer{i}")(x, mask)
        x = nn.LayerNorm(epsilon=1e-5, name="final_norm")(x)
        return embed.attend(x)


def clip_by_norm(max_norm):
    """Clip as torch.nn.utils.clip_grad_norm_ does."""

    def update(grads, state, params=None):
        coefficient = jnp.minimum(1.0, max_norm / (optax.global_norm(grads) + 1e-6))
        return jax.tree.map(lambda g: coefficient * g, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def decay_mask(params):
    matrices = ("kernel", "embedding", "positions")
    return jax.tree_util.tree_map_with_path(lambda path, p: path[-1].key in matrices, params)


def make_optimizer():
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=PEAK / (WARMUP + 1),
        peak_value=PEAK,
        warmup_steps=WARMUP,
        decay_steps=TOTAL,
        end_value=FLOOR,
    )
    return optax.chain(
        clip_by_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay_mask),
    )


# ------------------------------------------------------------------ the pair


def left():
    torch.manual_seed(0)
    model = GPT()
    x, y = make_batch()

    def loss_fn(x, y):
        count = (y != IGNORE).sum()
        total = 0.0
        for xb, yb in zip(x.chunk(ACCUM), y.chunk(ACCUM)):
            logits = model(xb)
            nll = F.cross_entropy(
                logits.view(-1, VOCAB), yb.reshape(-1), ignore_index=IGNORE, reduction="sum"
            )
            total = total + nll / count
        return total

    return stablenum_torch.program(
        loss_fn, torch.tensor(x).long(), torch.tensor(y).long(), model=model, optimizer=configure(model)
    )


def right():
    model = Decoder()
    tokens, targets = make_batch()
    params = model.init(jax.random.key(1), tokens)["params"]

    def loss_fn(params, tokens, targets):
        count = jnp.sum(targets != IGNORE)

        def micro_step(total, batch):
            inputs, labels = batch
            logits = model.apply({"params": params}, inputs)
            valid = labels != IGNORE
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, labels, 0))
            return total + jnp.sum(losses * valid), None

        split = lambda a: a.reshape(ACCUM, -1, a.shape[-1])
        total, _ = jax.lax.scan(micro_step, jnp.zeros(()), (split(tokens), split(targets)))
        return total / count

    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(tokens), jnp.asarray(targets), optimizer=make_optimizer()
    )
