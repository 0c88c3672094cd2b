"""Sentence classification.  torch.nn.TransformerEncoder on one side, hand-written NNX modules on the other."""
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import stablenum_jax
import stablenum_torch

VOCAB, WIDTH, HEADS, MLP, LAYERS, LABELS = 30, 24, 3, 36, 2, 5


def get_batch():
    rng = np.random.default_rng(6)
    ids = rng.integers(2, VOCAB, size=(5, 8))
    for row, n in enumerate([8, 6, 3, 7, 5]):
        ids[row, n:] = 1
    labels = rng.integers(0, LABELS, size=(5,))
    return ids, labels


class SentenceClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH, padding_idx=1)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, dim_feedforward=MLP, dropout=0.0, activation="gelu", batch_first=True, norm_first=False
        )
        self.encoder = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classifier = torch.nn.Linear(WIDTH, LABELS)
        with torch.no_grad():
            for p in self.encoder.parameters():
                p.add_(0.08 * torch.randn_like(p))
            self.embedding.weight[1] = 0.5 * torch.randn(WIDTH)

    def forward(self, ids):
        pad = ids == 1
        h = self.encoder(self.embedding(ids), src_key_padding_mask=pad)
        h = h.masked_fill(pad.unsqueeze(-1), 0.0)
        pooled = h.sum(dim=1) / (~pad).sum(dim=1, keepdim=True)
        return self.classifier(pooled)


def left():
    torch.manual_seed(33)
    model = SentenceClassifier().train()

    def loss_fn(ids, labels):
        return torch.nn.functional.cross_entropy(model(ids), labels)

    ids, labels = get_batch()
    return stablenum_torch.program(loss_fn, torch.tensor(ids), torch.tensor(labels), model=model)


def linear(n_in, n_out, rngs):
    return nnx.Linear(n_in, n_out, bias_init=nnx.initializers.normal(0.1), rngs=rngs)


class Norm(nnx.Module):
    """Layer norm with the one-pass variance."""

    def __init__(self, rngs):
        self.gain = nnx.Param(1.0 + 0.1 * rngs.params.normal((WIDTH,)))
        self.shift = nnx.Param(0.1 * rngs.params.normal((WIDTH,)))

    def __call__(self, x):
        mean = x.mean(-1, keepdims=True)
        var = (x * x).mean(-1, keepdims=True) - mean * mean
        gain = self.gain[...] * jax.lax.rsqrt(var + 1e-5)
        return x * gain + (self.shift[...] - mean * gain)


class MultiHead(nnx.Module):
    def __init__(self, rngs):
        self.query = linear(WIDTH, WIDTH, rngs)
        self.key = linear(WIDTH, WIDTH, rngs)
        self.value = linear(WIDTH, WIDTH, rngs)
        self.out = linear(WIDTH, WIDTH, rngs)

    def __call__(self, x, bias):
        size = WIDTH // HEADS
        q = self.query(x) * size**-0.5
        k, v = self.key(x), self.value(x)
        heads = []
        for i in range(HEADS):
            part = slice(i * size, (i + 1) * size)
            scores = q[..., part] @ k[..., part].swapaxes(-1, -2) + bias[:, None, :]
            heads.append(jax.nn.softmax(scores) @ v[..., part])
        return self.out(jnp.concatenate(heads, axis=-1))


class EncoderBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = MultiHead(rngs)
        self.fc_in = linear(WIDTH, MLP, rngs)
        self.fc_out = linear(MLP, WIDTH, rngs)
        self.norm_a, self.norm_b = Norm(rngs), Norm(rngs)

    def __call__(self, x, bias):
        x = self.norm_a(x + self.attention(x, bias))
        h = self.fc_in(x)
        h = 0.5 * h * (1.0 + jax.lax.erf(h / np.sqrt(2.0)))
        return self.norm_b(x + self.fc_out(h))


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(rngs.params.normal((VOCAB, WIDTH)))
        self.blocks = nnx.List([EncoderBlock(rngs) for _ in range(LAYERS)])
        self.head = linear(WIDTH, LABELS, rngs)

    def __call__(self, ids):
        real = ids != 1
        x = self.table[...][ids]
        x = jnp.where(real[..., None], x, jax.lax.stop_gradient(x))
        bias = jnp.where(real, 0.0, -1e9)
        for block in self.blocks:
            x = block(x, bias)
        weights = real / real.sum(axis=1, keepdims=True)
        return self.head(jnp.einsum("btd,bt->bd", x, weights))


def nll(model, ids, labels):
    log_probs = jax.nn.log_softmax(model(ids), axis=-1)
    return -log_probs[jnp.arange(labels.size), labels].mean()


def right():
    ids, labels = get_batch()
    return stablenum_jax.program(nll, Classifier(nnx.Rngs(params=15)), jnp.asarray(ids), jnp.asarray(labels))
