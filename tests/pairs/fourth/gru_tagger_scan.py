"""Bidirectional GRU tagger on pretrained word vectors, loss over the real tokens only."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stablenum_jax
import stablenum_torch

VOCAB, EMBED, HIDDEN, TAGS = 30, 16, 12, 6  # word 0 and tag 0 are the padding
LR, L2 = 2e-3, 1e-2


def make_batch():
    rng = np.random.default_rng(21)
    lengths = np.array([6, 10, 3, 8, 5])
    real = np.arange(10)[None, :] < lengths[:, None]
    words = np.where(real, rng.integers(1, VOCAB, size=(5, 10)), 0)
    tags = np.where(real, rng.integers(1, TAGS, size=(5, 10)), 0)
    return words.astype(np.int32), tags.astype(np.int32)


def word_vectors():
    vectors = np.random.default_rng(4).normal(scale=0.6, size=(VOCAB, EMBED)).astype(np.float32)
    vectors[0] = 0.0
    return vectors


# ---------------------------------------------------------------- PyTorch


class GRUTagger(nn.Module):
    def __init__(self, vectors):
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(vectors, freeze=False, padding_idx=0)
        self.gru = nn.GRU(EMBED, HIDDEN, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(2 * HIDDEN)
        self.fc = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, words):
        lengths = (words != 0).sum(dim=1)
        e = self.embed(words)
        packed = pack_padded_sequence(e, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed_out, _ = self.gru(packed)
        out, _ = pad_packed_sequence(packed_out, batch_first=True, total_length=words.shape[1])
        return self.fc(self.norm(out))


# ---------------------------------------------------------------- JAX


def init_params(key):
    keys = iter(jax.random.split(key, 8))

    def uniform(*shape):
        return jax.random.uniform(next(keys), shape, minval=-0.3, maxval=0.3)

    def direction():
        return {
            "w_input": uniform(EMBED, 3 * HIDDEN),
            "w_hidden": uniform(HIDDEN, 3 * HIDDEN),
            "b_input": jnp.zeros(3 * HIDDEN),
            "b_hidden": jnp.zeros(3 * HIDDEN),
        }

    return {
        "embedding": jnp.asarray(word_vectors()),
        "gru_forward": direction(),
        "gru_backward": direction(),
        "norm": {"scale": jnp.ones(2 * HIDDEN), "bias": jnp.zeros(2 * HIDDEN)},
        "head": {"kernel": uniform(2 * HIDDEN, TAGS), "bias": jnp.zeros(TAGS)},
    }


def gru_scan(p, inputs, mask, reverse=False):
    """inputs (time, batch, embed), mask (time, batch) -> states (time, batch, hidden), 0 at padding."""
    projected = inputs @ p["w_input"] + p["b_input"]

    def step(hidden, xs):
        x_t, m_t = xs
        h_t = hidden @ p["w_hidden"] + p["b_hidden"]
        x_r, x_z, x_n = jnp.split(x_t, 3, axis=-1)
        h_r, h_z, h_n = jnp.split(h_t, 3, axis=-1)
        reset = jax.nn.sigmoid(x_r + h_r)
        update = jax.nn.sigmoid(x_z + h_z)
        candidate = jnp.tanh(x_n + reset * h_n)
        new = (1.0 - update) * candidate + update * hidden
        hidden = jnp.where(m_t[:, None], new, hidden)
        return hidden, jnp.where(m_t[:, None], new, 0.0)

    start = jnp.zeros((inputs.shape[1], HIDDEN), inputs.dtype)
    _, states = jax.lax.scan(step, start, (projected, mask), reverse=reverse)
    return states


def layer_norm(p, x, eps=1e-5):
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centered**2, axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + eps) * p["scale"] + p["bias"]


def tagger(params, words):
    """words (batch, time) -> logits (time, batch, tags)"""
    words = words.T
    mask = words != 0
    vectors = params["embedding"][words]
    ahead = gru_scan(params["gru_forward"], vectors, mask)
    behind = gru_scan(params["gru_backward"], vectors, mask, reverse=True)
    features = layer_norm(params["norm"], jnp.concatenate([ahead, behind], axis=-1))
    return features @ params["head"]["kernel"] + params["head"]["bias"]


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = GRUTagger(torch.tensor(word_vectors()))
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=L2)
    words, tags = make_batch()

    def loss_fn(words, tags):
        logits = model(words)
        return F.cross_entropy(logits.reshape(-1, TAGS), tags.reshape(-1), ignore_index=0)

    return stablenum_torch.program(loss_fn, torch.tensor(words).long(), torch.tensor(tags).long(),
                                   model=model, optimizer=optimizer)


def right():
    params = init_params(jax.random.key(1))
    optimizer = optax.chain(optax.add_decayed_weights(L2), optax.adam(LR))
    words, tags = make_batch()

    def loss_fn(params, words, tags):
        log_probs = jax.nn.log_softmax(tagger(params, words))
        targets = tags.T
        picked = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
        counted = targets != 0
        return -jnp.sum(jnp.where(counted, picked, 0.0)) / jnp.sum(counted)

    return stablenum_jax.program(loss_fn, params, words, tags, optimizer=optimizer)
