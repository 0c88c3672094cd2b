"""T5 v1.1: in the manner of Hugging Face in PyTorch, in that of t5x in flax.linen."""

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

VOCAB, D_MODEL, HEADS, D_KV, D_FF, LAYERS = 31, 16, 3, 6, 28, 2
BUCKETS, MAX_DISTANCE = 8, 12
PAD, IGNORE, Z_LOSS = 0, -100, 1e-3
LR, DECAY = 2e-3, 0.05


def make_batch():
    rng = np.random.default_rng(5)
    source = rng.integers(1, VOCAB, (3, 11))
    target = rng.integers(1, VOCAB, (3, 9))
    for row, (ns, nt) in enumerate(((11, 6), (7, 9), (9, 8))):
        source[row, ns:] = PAD
        target[row, nt:] = PAD
    return source.astype(np.int32), target.astype(np.int32)


# ============================================================ PyTorch


class T5LayerNorm(torch.nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class T5DenseGatedActDense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0 = torch.nn.Linear(D_MODEL, D_FF, bias=False)
        self.wi_1 = torch.nn.Linear(D_MODEL, D_FF, bias=False)
        self.wo = torch.nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x):
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class T5Attention(torch.nn.Module):
    def __init__(self, is_decoder=False, has_relative_bias=False):
        super().__init__()
        self.is_decoder = is_decoder
        inner = HEADS * D_KV
        self.q = torch.nn.Linear(D_MODEL, inner, bias=False)
        self.k = torch.nn.Linear(D_MODEL, inner, bias=False)
        self.v = torch.nn.Linear(D_MODEL, inner, bias=False)
        self.o = torch.nn.Linear(inner, D_MODEL, bias=False)
        with torch.no_grad():
            self.q.weight.mul_(D_KV**-0.5)
        if has_relative_bias:
            self.relative_attention_bias = torch.nn.Embedding(BUCKETS, HEADS)

    def _bucket(self, relative_position):
        num_buckets, buckets = BUCKETS, 0
        if not self.is_decoder:
            num_buckets //= 2
            buckets = (relative_position > 0).long() * num_buckets
            relative_position = torch.abs(relative_position)
        else:
            relative_position = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        large = max_exact + (
            torch.log(relative_position.clamp(min=1).float() / max_exact)
            / math.log(MAX_DISTANCE / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = torch.clamp(large, max=num_buckets - 1)
        return buckets + torch.where(relative_position < max_exact, relative_position, large)

    def compute_bias(self, query_length, key_length):
        context_position = torch.arange(query_length)[:, None]
        memory_position = torch.arange(key_length)[None, :]
        values = self.relative_attention_bias(self._bucket(memory_position - context_position))
        return values.permute(2, 0, 1).unsqueeze(0)

    def forward(self, x, bias, kv=None):
        kv = x if kv is None else kv

        def shape(states):
            return states.view(states.shape[0], -1, HEADS, D_KV).transpose(1, 2)

        scores = torch.matmul(shape(self.q(x)), shape(self.k(kv)).transpose(3, 2))
        scores = scores + bias
        attn = F.softmax(scores, dim=-1)
        out = torch.matmul(attn, shape(self.v(kv))).transpose(1, 2).reshape(x.shape[0], -1, HEADS * D_KV)
        return self.o(out)


class T5Block(torch.nn.Module):
    def __init__(self, is_decoder, has_relative_bias):
        super().__init__()
        self.is_decoder = is_decoder
        self.self_norm = T5LayerNorm(D_MODEL)
        self.SelfAttention = T5Attention(is_decoder, has_relative_bias)
        if is_decoder:
            self.cross_norm = T5LayerNorm(D_MODEL)
            self.EncDecAttention = T5Attention(is_decoder)
        self.ff_norm = T5LayerNorm(D_MODEL)
        self.DenseReluDense = T5DenseGatedActDense()

    def forward(self, x, bias, memory=None, memory_mask=None):
        x = x + self.SelfAttention(self.self_norm(x), bias)
        if self.is_decoder:
            x = x + self.EncDecAttention(self.cross_norm(x), memory_mask, memory)
        return x + self.DenseReluDense(self.ff_norm(x))


class T5Stack(torch.nn.Module):
    def __init__(self, is_decoder):
        super().__init__()
        self.block = torch.nn.ModuleList(T5Block(is_decoder, i == 0) for i in range(LAYERS))
        self.final_layer_norm = T5LayerNorm(D_MODEL)

    def forward(self, x, mask, memory=None, memory_mask=None):
        bias = self.block[0].SelfAttention.compute_bias(x.shape[1], x.shape[1]) + mask
        for layer in self.block:
            x = layer(x, bias, memory, memory_mask)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Embedding(VOCAB, D_MODEL)
        self.encoder = T5Stack(False)
        self.decoder = T5Stack(True)

    def forward(self, input_ids, labels):
        lowest = torch.finfo(torch.float32).min
        padding = (1.0 - (input_ids != PAD).float())[:, None, None, :] * lowest
        decoder_input_ids = labels.new_zeros(labels.shape)
        decoder_input_ids[:, 1:] = labels[:, :-1].clone()
        decoder_input_ids.masked_fill_(decoder_input_ids == IGNORE, PAD)
        length = labels.shape[1]
        causal = torch.triu(torch.ones(length, length), diagonal=1)[None, None] * lowest
        memory = self.encoder(self.shared(input_ids), padding)
        sequence_output = self.decoder(self.shared(decoder_input_ids), causal, memory, padding)
        sequence_output = sequence_output * (D_MODEL**-0.5)
        return F.linear(sequence_output, self.shared.weight)


# ============================================================ JAX


def relative_buckets(relative, bidirectional):
    buckets = BUCKETS
    offset = 0
    if bidirectional:
        buckets //= 2
        offset = np.where(relative > 0, buckets, 0)
        distance = np.abs(relative)
    else:
        distance = np.maximum(-relative, 0)
    exact = buckets // 2
    spread = np.log(np.maximum(distance, 1) / exact) / np.log(MAX_DISTANCE / exact)
    far = np.minimum(exact + (spread * (buckets - exact)).astype(np.int32), buckets - 1)
    return offset + np.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    bidirectional: bool

    @nn.compact
    def __call__(self, qlen, klen):
        relative = np.arange(klen)[None, :] - np.arange(qlen)[:, None]
        table = self.param("rel_embedding", nn.initializers.normal(1.0), (HEADS, BUCKETS))
        return table[:, relative_buckets(relative, self.bidirectional)]


class Attention(nn.Module):
    @nn.compact
    def __call__(self, inputs, memory, mask, bias=None):
        project = lambda name: nn.DenseGeneral((HEADS, D_KV), use_bias=False, name=name)
        query = project("query")(inputs)
        key, value = project("key")(memory), project("value")(memory)
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            logits = logits + bias
        if mask is not None:
            logits = jnp.where(mask, logits, -1e10)
        weights = jax.nn.softmax(logits, axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(D_MODEL, axis=(-2, -1), use_bias=False, name="out")(mixed)


class GatedMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.gelu(nn.Dense(D_FF, use_bias=False, name="wi_gate")(x))
        linear = nn.Dense(D_FF, use_bias=False, name="wi_linear")(x)
        return nn.Dense(D_MODEL, use_bias=False, name="wo")(gate * linear)


class EncoderLayer(nn.Module):
    @nn.compact
    def __call__(self, x, mask, bias):
        h = nn.RMSNorm(name="pre_attention")(x)
        x = x + Attention(name="attention")(h, h, mask, bias)
        return x + GatedMlp(name="mlp")(nn.RMSNorm(name="pre_mlp")(x))


class DecoderLayer(nn.Module):
    @nn.compact
    def __call__(self, y, encoded, mask, cross_mask, bias):
        h = nn.RMSNorm(name="pre_self")(y)
        y = y + Attention(name="self_attention")(h, h, mask, bias)
        h = nn.RMSNorm(name="pre_cross")(y)
        y = y + Attention(name="cross_attention")(h, encoded, cross_mask)
        return y + GatedMlp(name="mlp")(nn.RMSNorm(name="pre_mlp")(y))


class T5(nn.Module):
    def setup(self):
        self.embed = nn.Embed(VOCAB, D_MODEL, embedding_init=nn.initializers.normal(1.0))
        self.encoder_bias = RelativeBias(True)
        self.decoder_bias = RelativeBias(False)
        self.encoder_layers = [EncoderLayer() for _ in range(LAYERS)]
        self.decoder_layers = [DecoderLayer() for _ in range(LAYERS)]
        self.encoder_norm = nn.RMSNorm()
        self.decoder_norm = nn.RMSNorm()

    def encode(self, source, mask):
        x = self.embed(source)
        bias = self.encoder_bias(x.shape[1], x.shape[1])
        for layer in self.encoder_layers:
            x = layer(x, mask, bias)
        return self.encoder_norm(x)

    def __call__(self, source, shifted):
        source_mask = nn.make_attention_mask(jnp.ones_like(source), source != PAD, dtype=bool)
        cross_mask = nn.make_attention_mask(jnp.ones_like(shifted), source != PAD, dtype=bool)
        encoded = self.encode(source, source_mask)
        y = self.embed(shifted)
        bias = self.decoder_bias(y.shape[1], y.shape[1])
        causal = nn.make_causal_mask(shifted, dtype=bool)
        for layer in self.decoder_layers:
            y = layer(y, encoded, causal, cross_mask, bias)
        y = self.decoder_norm(y)
        return self.embed.attend(y / np.sqrt(D_MODEL))


@jax.custom_vjp
def cross_entropy_with_logits(logits, onehot):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return log_z - jnp.sum(logits * onehot, axis=-1) + Z_LOSS * log_z**2


def _cross_entropy_fwd(logits, onehot):
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - jnp.sum(logits * onehot, axis=-1) + Z_LOSS * log_z**2
    return loss, (jnp.exp(logits - log_z[..., None]), onehot, log_z)


def _cross_entropy_bwd(saved, g):
    probs, onehot, log_z = saved
    slope = (1.0 + 2.0 * Z_LOSS * log_z)[..., None] * probs - onehot
    return g[..., None] * slope, None


cross_entropy_with_logits.defvjp(_cross_entropy_fwd, _cross_entropy_bwd)


def make_optimizer():
    return optax.chain(
        optax.scale_by_adam(),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(LR),
    )


# ============================================================ the pair


def left():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration()
    source, target = make_batch()
    labels = np.where(target == PAD, IGNORE, target)

    def loss_fn(input_ids, labels):
        lm_logits = model(input_ids, labels)
        ce = F.cross_entropy(lm_logits.view(-1, VOCAB), labels.view(-1), ignore_index=IGNORE)
        log_z = torch.logsumexp(lm_logits, dim=-1)[labels != IGNORE]
        return ce + Z_LOSS * log_z.square().mean()

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(source).long(),
        torch.tensor(labels).long(),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    )


def right():
    source, target = make_batch()
    model = T5()

    def shift_right(tokens):
        return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]

    params = model.init(jax.random.key(8), source, target)["params"]

    def loss_fn(params, source, target):
        logits = model.apply({"params": params}, source, shift_right(target))
        losses = cross_entropy_with_logits(logits, jax.nn.one_hot(target, VOCAB))
        weights = (target != PAD).astype(jnp.float32)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return stablenum_jax.program(
        loss_fn, params, jnp.asarray(source), jnp.asarray(target), optimizer=make_optimizer()
    )
