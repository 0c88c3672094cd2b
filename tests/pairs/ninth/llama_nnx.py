"""A Llama-like decoder on packed documents: PyTorch in the style of the hub, flax.nnx in JAX.

The two matrices into the feed-forward layer are trained quantised to 8 bits, per output channel, and the
gradient into the embeddings is shrunk as in GLM-130B.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 37, 32, 4, 2, 8, 44, 2
LENGTH, THETA, EPS = 20, 10000.0, 1e-5
SHRINK, Z_LOSS = 0.1, 1e-2
LR, DECAY = 1e-3, 0.1


def make_batch():
    """Tokens, and the number of the document of each from 1 on; 0 is padding at the end."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, VOCAB, (3, LENGTH))
    segments = np.zeros((3, LENGTH), dtype=np.int64)
    for row, lengths in enumerate(((7, 4, 9), (11, 6), (3, 8, 5, 2))):
        segments[row, : sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    tokens[segments == 0] = 0
    return tokens.astype(np.int32), segments.astype(np.int32)


# ------------------------------------------------------------- PyTorch


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotary_tables(position_ids):
    inv_freq = 1.0 / THETA ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    freqs = position_ids[..., None] * inv_freq
    emb = torch.cat((freqs, freqs), dim=-1)
    return emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)


def quantize_weight(w):
    scale = w.detach().abs().amax(dim=1, keepdim=True) / 127
    q = torch.round(w / scale).clamp(-128, 127) * scale
    return w + (q - w).detach()


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(b, t, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(DIM, FFN, bias=False)
        self.up_proj = nn.Linear(DIM, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x):
        gate = F.linear(x, quantize_weight(self.gate_proj.weight))
        up = F.linear(x, quantize_weight(self.up_proj.weight))
        return self.down_proj(F.silu(gate) * up)


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm(DIM)
        self.self_attn = LlamaAttention()
        self.post_attention_layernorm = RMSNorm(DIM)
        self.mlp = LlamaMLP()

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(LAYERS))
        self.norm = RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, segments):
        t = tokens.shape[1]
        index = torch.arange(t)
        begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
        position_ids = index - torch.cummax(torch.where(begins, index, 0), dim=1).values
        cos, sin = rotary_tables(position_ids)
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        mask = causal & (segments[:, :, None] == segments[:, None, :])
        x = self.embed_tokens(tokens)
        x = SHRINK * x + (1 - SHRINK) * x.detach()
        for layer in self.layers:
            x = layer(x, cos, sin, mask[:, None])
        return self.lm_head(self.norm(x))


def configure_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
    )


# ------------------------------------------------------------- JAX


@jax.custom_vjp
def fake_quant(w):
    step = jnp.max(jnp.abs(w), axis=0) / 127.0
    return jnp.clip(jnp.round(w / step), -128, 127) * step


fake_quant.defvjp(lambda w: (fake_quant(w), None), lambda _, g: (g,))


def apply_rope(x, positions):
    """x: batch, time, heads, width."""
    half = x.shape[-1] // 2
    timescale = THETA ** (jnp.arange(half) / half)
    angle = positions[:, :, None, None] / timescale
    a, b = x[..., :half], x[..., half:]
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)]
    return jnp.concatenate(turned, axis=-1)


def shrink_gradient(x):
    return x * SHRINK + jax.lax.stop_gradient(x * (1.0 - SHRINK))


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.wq = nnx.LinearGeneral(DIM, (HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.wk = nnx.LinearGeneral(DIM, (KV_HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.wv = nnx.LinearGeneral(DIM, (KV_HEADS, HEAD_DIM), use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(HEADS * HEAD_DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x, positions, mask):
        b, t, _ = x.shape
        q = apply_rope(self.wq(x), positions) / np.sqrt(HEAD_DIM)
        k = apply_rope(self.wk(x), positions)
        q = q.reshape(b, t, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
        scores = jnp.where(mask[:, None, None], scores, -1e30)
        probs = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", probs, self.wv(x))
        return self.wo(out.reshape(b, t, -1))


class GatedMLP(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.gate_up = nnx.Param(init(rngs.params(), (DIM, 2 * FFN)))
        self.down = nnx.Linear(FFN, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x):
        gate, up = jnp.split(x @ fake_quant(self.gate_up[...]), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class DecoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(DIM, epsilon=EPS, rngs=rngs)
        self.attention = Attention(rngs)
        self.mlp_norm = nnx.RMSNorm(DIM, epsilon=EPS, rngs=rngs)
        self.mlp = GatedMLP(rngs)

    def __call__(self, x, positions, mask):
        h = x + self.attention(self.attention_norm(x), positions, mask)
        return h + self.mlp(self.mlp_norm(h))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.blocks = nnx.List([DecoderBlock(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(DIM, epsilon=EPS, rngs=rngs)
        self.unembed = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens, segments):
        steps = jnp.arange(tokens.shape[1])
        first = jnp.argmax(segments[:, :, None] == segments[:, None, :], axis=-1)
        mask = (steps[:, None] >= steps[None, :]) & (segments[:, :, None] == segments[:, None, :])
        x = shrink_gradient(self.embed(tokens))
        for block in self.blocks:
            x = block(x, steps - first, mask)
        return self.unembed(self.final_norm(x))


def lm_loss(logits, tokens, segments):
    targets = tokens[:, 1:]
    weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    logits = logits[:, :-1]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    per_token = log_z - picked + Z_LOSS * log_z**2
    return jnp.sum(per_token * weights) / jnp.sum(weights)


def make_optimizer():
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(DECAY, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.scale_by_learning_rate(LR),
    )


# ------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Llama()

    def loss_fn(tokens, segments):
        logits = model(tokens, segments)[:, :-1].flatten(0, 1)
        labels = tokens[:, 1:].masked_fill(segments[:, 1:] != segments[:, :-1], -100)
        labels = labels.masked_fill(segments[:, 1:] == 0, -100).flatten()
        kept = labels != -100
        z = torch.logsumexp(logits, dim=-1).square()[kept].mean()
        return F.cross_entropy(logits, labels, ignore_index=-100) + Z_LOSS * z

    tokens, segments = make_batch()
    return stablenum_torch.program(
        loss_fn,
        torch.tensor(tokens).long(),
        torch.tensor(segments).long(),
        model=model,
        optimizer=configure_optimizer(model),
    )


def right():
    graphdef, params = nnx.split(Decoder(nnx.Rngs(3)), nnx.Param)

    def loss_fn(params, tokens, segments):
        model = nnx.merge(graphdef, params)
        return lm_loss(model(tokens, segments), tokens, segments)

    return stablenum_jax.program(
        loss_fn, params, *map(jnp.asarray, make_batch()), optimizer=make_optimizer()
    )
