"""A small diffusion transformer (DiT) with mixture-of-experts layers: v-prediction, min-SNR weights; nn / nnx."""

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

SIZE, PATCH, CHANNELS, CLASSES = 8, 2, 3, 5
DIM, HEADS, DEPTH, FREQUENCIES = 16, 2, 2, 12
EXPERTS, TOP_K, EXPERT_DIM = 4, 2, 24
TIMESTEPS, SNR_GAMMA = 1000, 5.0
BALANCE_COEF, Z_COEF = 0.02, 0.002
LR, DECAY, WARMUP = 2e-3, 0.1, 10
GRID = SIZE // PATCH


def make_batch():
    rng = np.random.default_rng(77)
    clean = np.tanh(rng.normal(size=(4, CHANNELS, SIZE, SIZE))).astype(np.float32)
    noise = rng.normal(size=clean.shape).astype(np.float32)
    t = np.array([12, 180, 430, 860])
    labels = np.array([3, CLASSES, 0, 2])  # CLASSES stands for "no label"
    return clean, noise, t, labels


def sincos_positions():
    omega = 1.0 / 10000 ** (np.arange(DIM // 4) / (DIM / 4))
    y, x = np.meshgrid(np.arange(GRID), np.arange(GRID), indexing="ij")
    table = []
    for axis in (x, y):
        angle = axis.reshape(-1, 1) * omega
        table += [np.sin(angle), np.cos(angle)]
    return np.concatenate(table, axis=1)[None].astype(np.float32)


def alpha_bars():
    return np.cumprod(1.0 - np.linspace(1e-4, 0.02, TIMESTEPS)).astype(np.float32)


# ---------------------------------------------------------------- PyTorch


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FREQUENCIES, DIM), nn.SiLU(), nn.Linear(DIM, DIM))

    def forward(self, t):
        half = FREQUENCIES // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half) / half)
        args = t[:, None].to(freqs.dtype) * freqs[None]
        embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
        return self.mlp(embedding)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class SparseMoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, DIM, EXPERT_DIM) / DIM**0.5)
        self.b_in = nn.Parameter(0.2 * torch.randn(EXPERTS, EXPERT_DIM))
        self.w_out = nn.Parameter(torch.randn(EXPERTS, EXPERT_DIM, DIM) / EXPERT_DIM**0.5)
        self.b_out = nn.Parameter(0.2 * torch.randn(EXPERTS, DIM))
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        tokens = x.reshape(-1, DIM)
        router_logits = self.router(tokens)
        routing = F.softmax(router_logits, dim=-1)
        weights, selected = torch.topk(routing, TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            token, slot = torch.where(selected == e)
            h = self.act(tokens[token] @ self.w_in[e] + self.b_in[e])
            h = h @ self.w_out[e] + self.b_out[e]
            out = out.index_add(0, token, h * weights[token, slot].unsqueeze(-1))

        assigned = F.one_hot(selected, EXPERTS).to(x.dtype).mean(dim=(0, 1))
        balance = EXPERTS * (assigned * routing.mean(dim=0)).sum()
        z_loss = torch.logsumexp(router_logits, dim=-1).pow(2).mean()
        return out.view_as(x), BALANCE_COEF * balance + Z_COEF * z_loss


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.mlp = SparseMoE()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_a.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_a, scale_a))
        y, aux = self.mlp(modulate(self.norm2(x), shift_m, scale_m))
        return x + gate_m.unsqueeze(1) * y, aux


class FinalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(DIM, PATCH * PATCH * CHANNELS)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 2 * DIM))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm(x), shift, scale))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder = nn.Conv2d(CHANNELS, DIM, PATCH, stride=PATCH)
        self.t_embedder = TimestepEmbedder()
        self.y_embedder = nn.Embedding(CLASSES + 1, DIM)
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(DEPTH)])
        self.final_layer = FinalLayer()
        self.register_buffer("pos_embed", torch.from_numpy(sincos_positions()))

    def unpatchify(self, x):
        x = x.reshape(x.shape[0], GRID, GRID, PATCH, PATCH, CHANNELS)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(x.shape[0], CHANNELS, SIZE, SIZE)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.y_embedder(y)
        aux_loss = 0.0
        for block in self.blocks:
            x, aux = block(x, c)
            aux_loss = aux_loss + aux
        return self.unpatchify(self.final_layer(x, c)), aux_loss


def make_adamw(model):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (no_decay if name.endswith(("bias", "b_in", "b_out")) else decay).append(p)
    groups = [{"params": decay, "weight_decay": DECAY}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


# ---------------------------------------------------------------- JAX


def timestep_features(t):
    half = FREQUENCIES // 2
    angles = t[:, None] * jnp.power(10000.0, -jnp.arange(half) / half)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)


class SelfAttention(nnx.Module):
    def __init__(self, rngs):
        self.to_qkv = nnx.Linear(DIM, 3 * DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        qkv = self.to_qkv(x).reshape(*x.shape[:2], 3 * HEADS, -1)
        q, k, v = jnp.split(qkv, 3, axis=2)
        return self.out(nnx.dot_product_attention(q, k, v).reshape(x.shape))


class Experts(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.router = nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)
        self.w_in = nnx.Param(init(rngs.params(), (EXPERTS, DIM, EXPERT_DIM)))
        self.b_in = nnx.Param(jnp.zeros((EXPERTS, EXPERT_DIM)))
        self.w_out = nnx.Param(init(rngs.params(), (EXPERTS, EXPERT_DIM, DIM)))
        self.b_out = nnx.Param(jnp.zeros((EXPERTS, DIM)))

    def __call__(self, x):
        logits = self.router(x)
        probs = jax.nn.softmax(logits)
        top, chosen = jax.lax.top_k(probs, TOP_K)
        top = top / jnp.sum(top, axis=-1, keepdims=True)
        dispatch = jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)
        gates = jnp.einsum("btk,btke->bte", top, dispatch)

        h = jnp.einsum("btd,edh->bteh", x, self.w_in[...]) + self.b_in[...]
        y = jnp.einsum("bteh,ehd->bted", jax.nn.gelu(h), self.w_out[...]) + self.b_out[...]
        load = jnp.mean(dispatch, axis=(0, 1, 2))
        balance = EXPERTS * jnp.dot(load, jnp.mean(probs, axis=(0, 1)))
        z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
        return jnp.einsum("bte,bted->btd", gates, y), BALANCE_COEF * balance + Z_COEF * z


class Modulated(nnx.Module):
    """LayerNorm without weights, scaled and shifted by the condition."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x, shift, scale):
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class Block(nnx.Module):
    def __init__(self, rngs):
        self.pre_attention, self.pre_experts = Modulated(rngs), Modulated(rngs)
        self.attention = SelfAttention(rngs)
        self.experts = Experts(rngs)
        self.condition = nnx.Linear(DIM, 6 * DIM, rngs=rngs)

    def __call__(self, x, c):
        s1, k1, g1, s2, k2, g2 = jnp.split(self.condition(nnx.silu(c)), 6, axis=-1)
        x = x + g1[:, None] * self.attention(self.pre_attention(x, s1, k1))
        y, aux = self.experts(self.pre_experts(x, s2, k2))
        return x + g2[:, None] * y, aux


class Denoiser(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(
            CHANNELS, DIM, (PATCH, PATCH), strides=PATCH, padding="VALID", rngs=rngs
        )
        self.time1 = nnx.Linear(FREQUENCIES, DIM, rngs=rngs)
        self.time2 = nnx.Linear(DIM, DIM, rngs=rngs)
        self.label = nnx.Embed(CLASSES + 1, DIM, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.last = Modulated(rngs)
        self.last_condition = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.to_pixels = nnx.Linear(DIM, PATCH * PATCH * CHANNELS, rngs=rngs)

    def __call__(self, images, t, labels):
        n = images.shape[0]
        x = self.patches(images).reshape(n, GRID * GRID, DIM) + sincos_positions()
        c = self.time2(nnx.silu(self.time1(timestep_features(t)))) + self.label(labels)
        penalty = 0.0
        for layer in self.layers:
            x, aux = layer(x, c)
            penalty += aux
        shift, scale = jnp.split(self.last_condition(nnx.silu(c)), 2, axis=-1)
        x = self.to_pixels(self.last(x, shift, scale))
        x = x.reshape(n, GRID, GRID, PATCH, PATCH, CHANNELS).swapaxes(2, 3)
        return x.reshape(n, SIZE, SIZE, CHANNELS), penalty


def decayed(path, p):
    name = jax.tree_util.keystr(path)
    return p.ndim > 1 and "b_in" not in name and "b_out" not in name


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(11)
    model = DiT()
    abar = torch.from_numpy(alpha_bars())

    def loss_fn(x_start, noise, t, y):
        a = abar[t].view(-1, 1, 1, 1)
        x_t = a.sqrt() * x_start + (1 - a).sqrt() * noise
        target = a.sqrt() * noise - (1 - a).sqrt() * x_start
        prediction, aux_loss = model(x_t, t, y)
        snr = abar[t] / (1 - abar[t])
        mse_loss_weights = torch.stack([snr, SNR_GAMMA * torch.ones_like(snr)], dim=1).min(dim=1)[0]
        mse_loss_weights = mse_loss_weights / (snr + 1)
        loss = F.mse_loss(prediction, target, reduction="none")
        loss = loss.mean(dim=list(range(1, loss.dim()))) * mse_loss_weights
        return loss.mean() + aux_loss

    return stablenum_torch.program(
        loss_fn, *(torch.from_numpy(a) for a in make_batch()), model=model, optimizer=make_adamw(model)
    )


def right():
    graphdef, params = nnx.split(Denoiser(nnx.Rngs(4)), nnx.Param)
    clean, noise, t, labels = make_batch()
    batch = [jnp.asarray(a) for a in (clean.transpose(0, 2, 3, 1), noise.transpose(0, 2, 3, 1), t, labels)]

    def loss_fn(params, clean, noise, t, labels):
        abar = jnp.asarray(alpha_bars())[t]
        signal, sigma = (jnp.sqrt(s)[:, None, None, None] for s in (abar, 1 - abar))
        velocity, penalty = nnx.merge(graphdef, params)(signal * clean + sigma * noise, t, labels)
        error = jnp.mean((velocity - (signal * noise - sigma * clean)) ** 2, axis=(1, 2, 3))
        snr = abar / (1 - abar)
        weight = jnp.minimum(snr, SNR_GAMMA) / (snr + 1)
        return jnp.mean(weight * error) + penalty

    schedule = optax.linear_schedule(LR / WARMUP, LR, WARMUP - 1)
    mask = jax.tree_util.tree_map_with_path(decayed, params)
    tx = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=DECAY, mask=mask)
    return stablenum_jax.program(loss_fn, params, *batch, optimizer=tx)
