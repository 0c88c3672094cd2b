"""Sequence-pair classifier: nn.TransformerEncoderLayer in PyTorch, flax.nnx in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from flax import nnx
from torch import nn

import stablenum_jax
import stablenum_torch

VOCAB, LENGTH, WIDTH, FFN, HEADS, DEPTH, CLASSES = 37, 10, 16, 48, 4, 2, 3
PAD = 0


def make_batch():
    rng = np.random.default_rng(5)
    ids = rng.integers(1, VOCAB, (5, LENGTH))
    types = np.zeros_like(ids)
    for row, (first, length) in enumerate(((4, 10), (3, 6), (5, 8), (2, 7), (6, 9))):
        ids[row, length:] = PAD
        types[row, first:length] = 1
    labels = np.array([0, 2, 1, 1, 0])
    return ids.astype(np.int32), types.astype(np.int32), labels.astype(np.int32)


# ---------------------------------------------------------------- PyTorch


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(LENGTH).expand((1, -1)))
        for table in (self.word_embeddings, self.position_embeddings, self.token_type_embeddings):
            nn.init.normal_(table.weight, std=0.02)
        nn.init.zeros_(self.word_embeddings.weight[PAD])

    def forward(self, input_ids, token_type_ids):
        words = self.word_embeddings(input_ids)
        positions = self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        token_types = self.token_type_embeddings(token_type_ids)
        return self.LayerNorm(words + positions + token_types)


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, dim_feedforward=FFN, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(DEPTH)
        )
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids, token_type_ids):
        x = self.embeddings(input_ids, token_type_ids)
        padding = input_ids == PAD
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return self.classifier(pooled)


def grouped_parameters(model):
    skip = ("bias", "LayerNorm.weight", "norm1.weight", "norm2.weight")
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if not n.endswith(skip)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(skip)], "weight_decay": 0.0},
    ]


# ---------------------------------------------------------------- JAX


class EncoderLayer(nnx.Module):
    def __init__(self, *, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.intermediate = nnx.Linear(WIDTH, FFN, rngs=rngs)
        self.output = nnx.Linear(FFN, WIDTH, rngs=rngs)
        self.output_norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, hidden, mask):
        attended = self.attention(hidden, mask=mask)
        hidden = self.attention_norm(hidden + attended)
        inner = jax.nn.gelu(self.intermediate(hidden), approximate=False)
        return self.output_norm(hidden + self.output(inner))


class BertClassifier(nnx.Module):
    def __init__(self, *, rngs):
        self.words = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.types = nnx.Embed(2, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([EncoderLayer(rngs=rngs) for _ in range(DEPTH)])
        self.pooler = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, ids, types):
        positions = jnp.arange(ids.shape[1])
        hidden = self.words(ids) + self.types(types) + self.positions(positions)
        hidden = self.norm(hidden)
        attend = (ids != PAD)[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, attend)
        first = hidden[:, 0, :]
        return self.head(jnp.tanh(self.pooler(first)))


def smoothed(labels, alpha):
    targets = jax.nn.one_hot(labels, CLASSES)
    return targets * (1.0 - alpha) + alpha / CLASSES


def decay_mask(params):
    def decays(path, leaf):
        name = jax.tree_util.keystr(path)
        return "bias" not in name and "scale" not in name

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer():
    rate = optax.linear_schedule(init_value=2e-4, end_value=0.0, transition_steps=50)
    return optax.chain(
        optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-6),
        optax.add_decayed_weights(0.01, mask=decay_mask),
        optax.scale_by_learning_rate(rate),
    )


# ---------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Bert()
    optimizer = torch.optim.AdamW(grouped_parameters(model), lr=2e-4, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 50))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    ids, types, labels = (torch.tensor(a).long() for a in make_batch())

    def loss_fn(ids, types, labels):
        return criterion(model(ids, types), labels)

    return stablenum_torch.program(loss_fn, ids, types, labels, model=model, optimizer=optimizer)


def right():
    model = BertClassifier(rngs=nnx.Rngs(0))
    ids, types, labels = make_batch()

    def loss_fn(model, ids, types, labels):
        log_probs = jax.nn.log_softmax(model(ids, types), axis=-1)
        return -jnp.mean(jnp.sum(smoothed(labels, 0.1) * log_probs, axis=-1))

    return stablenum_jax.program(
        loss_fn,
        model,
        jnp.asarray(ids),
        jnp.asarray(types),
        jnp.asarray(labels),
        optimizer=make_optimizer(),
    )
