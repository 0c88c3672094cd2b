"""A GRU tagger with additive attention, trained by truncated backpropagation: PyTorch and its port to flax nnx."""
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

VOCAB, EMBED, HIDDEN, ATTENTION, TAGS = 29, 12, 16, 10, 6
LENGTH, CHUNK = 12, 6
LR, WEIGHT_DECAY = 2e-3, 0.1


def make_batch():
    rng = np.random.default_rng(31)
    lengths = np.array([12, 8, 10, 5])
    tokens = rng.integers(1, VOCAB, size=(4, LENGTH))
    tags = rng.integers(0, TAGS, size=(4, LENGTH))
    tokens[np.arange(LENGTH) >= lengths[:, None]] = 0
    return tokens, tags, lengths


# ---------------------------------------------------------------- PyTorch

class AdditiveAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(HIDDEN, ATTENTION)
        self.memory = nn.Linear(HIDDEN, ATTENTION, bias=False)
        self.energy = nn.Linear(ATTENTION, 1, bias=False)

    def forward(self, query, states, valid):
        hidden = torch.tanh(self.query(query).unsqueeze(1) + self.memory(states))
        scores = self.energy(hidden).squeeze(-1)
        scores = scores.masked_fill(~valid, float("-inf"))
        weights = torch.softmax(scores, dim=1)
        return torch.bmm(weights.unsqueeze(1), states).squeeze(1)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED)
        self.rnn = nn.GRU(EMBED, HIDDEN, batch_first=True)
        self.attention = AdditiveAttention()
        self.classifier = nn.Linear(2 * HIDDEN, TAGS)

    def encode(self, tokens):
        outputs, state = [], None
        for chunk in self.embed(tokens).split(CHUNK, dim=1):
            if state is not None:
                state = state.detach()
            output, state = self.rnn(chunk, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def forward(self, tokens, lengths):
        valid = torch.arange(tokens.shape[1])[None] < lengths[:, None]
        states = self.encode(tokens)
        last = states[torch.arange(len(lengths)), lengths - 1]
        context = self.attention(last, states, valid)
        features = torch.cat([states, context[:, None].expand_as(states)], dim=-1)
        return self.classifier(features), valid


def left():
    torch.manual_seed(8)
    model = Tagger()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-6)

    def loss_fn(tokens, tags, lengths):
        logits, valid = model(tokens, lengths)
        return F.cross_entropy(logits[valid], tags[valid])

    return stablenum_torch.program(loss_fn, *map(torch.from_numpy, make_batch()), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- flax nnx

def uniform(rngs, *shape):
    return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-0.3, maxval=0.3))


class GRU(nnx.Module):
    def __init__(self, inputs, hidden, rngs):
        self.hidden = hidden
        self.input_kernel = uniform(rngs, inputs, 3 * hidden)
        self.input_bias = uniform(rngs, 3 * hidden)
        self.hidden_kernel = uniform(rngs, hidden, 3 * hidden)
        self.hidden_bias = uniform(rngs, 3 * hidden)

    def __call__(self, x, state):
        kernel, bias = self.hidden_kernel[...], self.hidden_bias[...]
        projected = x @ self.input_kernel[...] + self.input_bias[...]

        def step(h, inputs):
            recurrent = h @ kernel + bias
            xr, xz, xn = jnp.split(inputs, 3, axis=-1)
            hr, hz, hn = jnp.split(recurrent, 3, axis=-1)
            reset, update = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
            candidate = jnp.tanh(xn + reset * hn)
            h = candidate + update * (h - candidate)
            return h, h

        state, outputs = jax.lax.scan(step, state, jnp.swapaxes(projected, 0, 1))
        return jnp.swapaxes(outputs, 0, 1), state


class BahdanauAttention(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(HIDDEN, ATTENTION, bias_init=nnx.initializers.normal(0.2), rngs=rngs)
        self.keys = nnx.Linear(HIDDEN, ATTENTION, use_bias=False, rngs=rngs)
        self.vector = uniform(rngs, ATTENTION, 1)

    def __call__(self, query, states, valid):
        hidden = jnp.tanh(self.keys(states) + self.query(query)[:, None])
        scores = (hidden @ self.vector[...])[..., 0]
        weights = jax.nn.softmax(jnp.where(valid, scores, -1e9), axis=-1)
        return jnp.einsum("bt,btd->bd", weights, states)


class SequenceTagger(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.gru = GRU(EMBED, HIDDEN, rngs)
        self.attention = BahdanauAttention(rngs)
        self.state_head = nnx.Linear(HIDDEN, TAGS, bias_init=nnx.initializers.normal(0.2), rngs=rngs)
        self.context_head = nnx.Linear(HIDDEN, TAGS, use_bias=False, rngs=rngs)

    def encode(self, tokens):
        x = self.embed(tokens)
        carry = jnp.zeros((x.shape[0], HIDDEN), x.dtype)
        outputs = []
        for start in range(0, LENGTH, CHUNK):
            carry = jax.lax.stop_gradient(carry)
            output, carry = self.gru(x[:, start:start + CHUNK], carry)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)

    def __call__(self, tokens, lengths):
        valid = jnp.arange(tokens.shape[1]) < lengths[:, None]
        states = self.encode(tokens)
        last = jnp.take_along_axis(states, (lengths - 1)[:, None, None], axis=1)[:, 0]
        context = self.attention(last, states, valid)
        return self.state_head(states) + self.context_head(context)[:, None], valid


def loss_fn(model, tokens, tags, lengths):
    logits, valid = model(tokens, lengths)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    token_losses = -jnp.sum(jax.nn.one_hot(tags, TAGS, dtype=log_probs.dtype) * log_probs, axis=-1)
    return jnp.sum(token_losses * valid) / jnp.sum(lengths)


def right():
    optimizer = optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-6),
        optax.add_decayed_weights(WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)),
        optax.scale(-LR),
    )
    model = SequenceTagger(nnx.Rngs(17))
    return stablenum_jax.program(loss_fn, model, *map(jnp.asarray, make_batch()), optimizer=optimizer)
