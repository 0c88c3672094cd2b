"""A small Llama-style decoder: Hugging Face style PyTorch against a flax.nnx port."""
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

VOCAB, DIM, LAYERS = 40, 32, 2
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
HIDDEN, SEQ, BATCH = 48, 12, 3
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
PEAK_LR, WARMUP, DECAY = 3e-3, 10, 0.1
IGNORE = -100


def make_batch():
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, VOCAB, size=(BATCH, SEQ))
    labels = tokens.copy()
    for row, length in enumerate((12, 9, 7)):
        labels[row, length:] = IGNORE
    return tokens, labels


# ---------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=NORM_EPS):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states


class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, theta=ROPE_THETA):
        super().__init__()
        inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids):
        freqs = position_ids[:, None].to(self.inv_freq.dtype) * self.inv_freq[None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    first = x[..., : x.shape[-1] // 2]
    second = x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary(q, k, cos, sin):
    q_rot = (q * cos) + (rotate_half(q) * sin)
    k_rot = (k * cos) + (rotate_half(k) * sin)
    return q_rot, k_rot


def repeat_kv(states, n_rep):
    batch, kv_heads, length, head_dim = states.shape
    states = states[:, :, None, :, :].expand(batch, kv_heads, n_rep, length, head_dim)
    return states.reshape(batch, kv_heads * n_rep, length, head_dim)


class LlamaAttention(nn.Module):
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
        q, k = apply_rotary(q, k, cos, sin)
        k = repeat_kv(k, HEADS // KV_HEADS)
        v = repeat_kv(v, HEADS // KV_HEADS)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM)
        return self.o_proj(out)


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = LlamaAttention()
        self.mlp = LlamaMLP()
        self.input_layernorm = RMSNorm(DIM)
        self.post_attention_layernorm = RMSNorm(DIM)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class LlamaForCausalLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList([LlamaDecoderLayer() for _ in range(LAYERS)])
        self.norm = RMSNorm(DIM)
        self.rotary_emb = RotaryEmbedding(HEAD_DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.15)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def causal_lm_loss(logits, labels):
    shift_logits = logits[:, :-1, :].contiguous()
    shift_labels = labels[:, 1:].contiguous()
    return F.cross_entropy(
        shift_logits.view(-1, VOCAB), shift_labels.view(-1), ignore_index=IGNORE
    )


def left():
    torch.manual_seed(0)
    model = LlamaForCausalLM()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": DECAY}, {"params": no_decay, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8,
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    tokens, labels = make_batch()

    def loss_fn(tokens, labels):
        return causal_lm_loss(model(tokens), labels)

    return stablenum_torch.program(
        loss_fn, torch.tensor(tokens), torch.tensor(labels), model=model, optimizer=optimizer
    )


# ---------------------------------------------------------------- JAX, flax.nnx


def rope_tables(length, head_dim):
    exponent = jnp.arange(head_dim // 2) * 2.0 / head_dim
    angles = jnp.arange(length)[:, None] * ROPE_THETA ** (-exponent)
    return jnp.sin(angles)[None, :, None, :], jnp.cos(angles)[None, :, None, :]


def rope(heads, sin, cos):
    """heads: [batch, time, heads, head_dim]"""
    a, b = jnp.split(heads, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@jax.custom_vjp
def swiglu(gate, up):
    return gate * jax.nn.sigmoid(gate) * up


def swiglu_fwd(gate, up):
    # keep only the two projections; the activation is recomputed in the backward pass
    return swiglu(gate, up), (gate, up)


def swiglu_bwd(saved, g):
    gate, up = saved
    sig = jax.nn.sigmoid(gate)
    act = gate * sig
    d_gate = g * up * (sig + act * (1.0 - sig))
    return d_gate, g * act


swiglu.defvjp(swiglu_fwd, swiglu_bwd)


class GroupedQueryAttention(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x, mask, sin, cos):
        b, t, _ = x.shape
        qkv = self.qkv(x).reshape(b, t, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = jnp.split(qkv, [HEADS, HEADS + KV_HEADS], axis=2)
        q = rope(q, sin, cos) * HEAD_DIM**-0.5
        k = rope(k, sin, cos)
        q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("bkgts,bskd->btkgd", weights, v)
        return self.out(mixed.reshape(b, t, HEADS * HEAD_DIM))


class FeedForward(nnx.Module):
    def __init__(self, rngs):
        self.gate_up = nnx.Linear(DIM, 2 * HIDDEN, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(swiglu(gate, up))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attn_norm = nnx.RMSNorm(DIM, epsilon=NORM_EPS, rngs=rngs)
        self.attn = GroupedQueryAttention(rngs)
        self.ffn_norm = nnx.RMSNorm(DIM, epsilon=NORM_EPS, rngs=rngs)
        self.ffn = FeedForward(rngs)

    def __call__(self, x, mask, sin, cos):
        x = x + self.attn(self.attn_norm(x), mask, sin, cos)
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(DIM, epsilon=NORM_EPS, rngs=rngs)

    def __call__(self, tokens):
        t = tokens.shape[1]
        mask = jnp.tril(jnp.ones((t, t), dtype=bool))
        sin, cos = rope_tables(t, HEAD_DIM)
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, mask, sin, cos)
        return self.wte.attend(self.final_norm(x))


def right():
    model = Decoder(nnx.Rngs(0))
    tokens, labels = make_batch()

    def loss_fn(model, tokens, labels):
        logits = model(tokens)[:, :-1]
        targets = labels[:, 1:]
        keep = targets != IGNORE
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(keep, targets, 0))
        return jnp.sum(nll * keep) / jnp.sum(keep)

    schedule = optax.linear_schedule(PEAK_LR / WARMUP, PEAK_LR, WARMUP - 1)
    optimizer = optax.adamw(
        schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=DECAY,
        mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
    return stablenum_jax.program(loss_fn, model, tokens, labels, optimizer=optimizer)
