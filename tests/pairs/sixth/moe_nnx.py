"""A small mixture-of-experts language model (top-2 routing, SwiGLU experts): PyTorch and flax nnx."""
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

VOCAB, DIM, HEADS, HIDDEN, EXPERTS, TOP_K, LAYERS, LENGTH = 48, 32, 4, 24, 4, 2, 2, 12
AUX_WEIGHT, Z_WEIGHT = 0.02, 0.01
PEAK_LR, WARMUP, TOTAL = 3e-3, 10, 200


def make_batch():
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, VOCAB, size=(4, LENGTH + 1))
    return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)


# ---------------------------------------------------------------- PyTorch

class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, dim))


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoE(nn.Module):
    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.num_experts, self.top_k = experts, top_k
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        router_logits = self.gate(x)
        probs = F.softmax(router_logits, dim=-1)
        weights, selected = torch.topk(probs, self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(selected == index)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        # load balancing (Switch) and router z-loss (ST-MoE)
        load = F.one_hot(selected, self.num_experts).float().sum(dim=1).mean(dim=0) / self.top_k
        importance = probs.mean(dim=0)
        balance = self.num_experts * torch.sum(load * importance)
        z_loss = torch.logsumexp(router_logits, dim=-1).pow(2).mean()
        return out.reshape(shape), balance, z_loss


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = RMSNorm(DIM)
        self.attn = CausalSelfAttention(DIM, HEADS)
        self.norm2 = RMSNorm(DIM)
        self.moe = SparseMoE(DIM, HIDDEN, EXPERTS, TOP_K)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        y, balance, z_loss = self.moe(self.norm2(x))
        return x + y, balance, z_loss


class MoELM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(LENGTH, DIM) * 0.02)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(LAYERS))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        for layer in self.layers:
            nn.init.normal_(layer.moe.gate.weight, std=0.4)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos[: tokens.shape[1]]
        balance, z_loss = 0.0, 0.0
        for layer in self.layers:
            x, b, z = layer(x)
            balance, z_loss = balance + b, z_loss + z
        return self.head(self.norm(x)), balance, z_loss


class ClippedAdamW(torch.optim.AdamW):
    """AdamW that clips the global gradient norm first."""

    def __init__(self, params, max_norm, **kwargs):
        super().__init__(params, **kwargs)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        return super().step(closure)


def lr_factor(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (TOTAL - WARMUP)))


def left():
    torch.manual_seed(0)
    model = MoELM()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    optimizer = ClippedAdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        max_norm=1.0, lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    tokens, targets = make_batch()

    def loss_fn(tokens, targets):
        logits, balance, z_loss = model(tokens)
        ce = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return ce + AUX_WEIGHT * balance + Z_WEIGHT * z_loss

    return stablenum_torch.program(loss_fn, torch.tensor(tokens), torch.tensor(targets), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (flax nnx)

class JaxAttention(nnx.Module):
    def __init__(self, rngs):
        self.wq = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.wk = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.wv = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        heads = lambda t: t.reshape(batch, length, HEADS, DIM // HEADS)
        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * (DIM // HEADS) ** -0.5, k)
        causal = jnp.tril(jnp.ones((length, length), bool))
        attn = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        return self.wo(jnp.einsum("bhqk,bkhd->bqhd", attn, v).reshape(batch, length, DIM))


class JaxMoE(nnx.Module):
    """All experts in one set of arrays, dense dispatch."""

    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)
        self.w_gate = nnx.Param(init(rngs.params(), (EXPERTS, DIM, HIDDEN)))
        self.w_up = nnx.Param(init(rngs.params(), (EXPERTS, DIM, HIDDEN)))
        self.w_down = nnx.Param(init(rngs.params(), (EXPERTS, HIDDEN, DIM)))

    def __call__(self, x):
        logits = self.router(x)
        probs = jax.nn.softmax(logits, axis=-1)
        gates, chosen = jax.lax.top_k(probs, TOP_K)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        picked = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
        combine = jnp.einsum("blk,blke->ble", gates, picked)
        gate = jnp.einsum("bld,edf->blef", x, self.w_gate[...])
        up = jnp.einsum("bld,edf->blef", x, self.w_up[...])
        expert_out = jnp.einsum("blef,efd->bled", jax.nn.silu(gate) * up, self.w_down[...])
        y = jnp.einsum("bled,ble->bld", expert_out, combine)
        load = jnp.mean(picked, axis=(0, 1, 2))
        importance = jnp.mean(probs, axis=(0, 1))
        balance = EXPERTS * jnp.vdot(load, importance)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return y, balance, jnp.mean(jnp.square(log_z))


class JaxLayer(nnx.Module):
    def __init__(self, rngs):
        self.attn_norm = nnx.RMSNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.attn = JaxAttention(rngs)
        self.moe_norm = nnx.RMSNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.moe = JaxMoE(rngs)

    def __call__(self, x):
        h = self.attn_norm(x)
        x = x + self.attn(h)
        h = self.moe_norm(x)
        y, balance, z_loss = self.moe(h)
        return x + y, balance, z_loss


class JaxMoELM(nnx.Module):
    def __init__(self, rngs):
        self.tok = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.pos = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.layers = nnx.List([JaxLayer(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(DIM, epsilon=1e-5, rngs=rngs)
        self.lm_head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.tok(tokens) + self.pos[...]
        balances, z_losses = [], []
        for layer in self.layers:
            x, balance, z_loss = layer(x)
            balances.append(balance)
            z_losses.append(z_loss)
        return self.lm_head(self.final_norm(x)), sum(balances), sum(z_losses)


def schedule(count):
    warm = (count + 1) / WARMUP
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * (count - WARMUP) / (TOTAL - WARMUP)))
    return PEAK_LR * jnp.where(count < WARMUP, warm, cosine)


def right():
    model = JaxMoELM(nnx.Rngs(0))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim >= 2, params)),
        optax.scale_by_learning_rate(schedule),
    )
    tokens, targets = make_batch()

    def loss_fn(model, tokens, targets):
        logits, balance, z_loss = model(tokens)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        nll = -jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
        return jnp.mean(nll) + AUX_WEIGHT * balance + Z_WEIGHT * z_loss

    return stablenum_jax.program(loss_fn, model, tokens, targets, optimizer=optimizer)
