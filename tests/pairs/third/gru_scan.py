"""A two-layer GRU text classifier: the PyTorch original (packed sequences) and its plain JAX port (masked scans)."""
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stablenum_jax
import stablenum_torch

VOCAB, EMBED, HIDDEN, CLASSES = 37, 16, 20, 5
SMOOTHING = 0.1
LEARNING_RATE, BETA1, BETA2, EPSILON = 2e-3, 0.9, 0.98, 1e-6


def make_batch():
    rng = np.random.default_rng(31)
    lengths = np.array([9, 4, 7, 2, 9, 6], dtype=np.int64)
    tokens = rng.integers(1, VOCAB, size=(6, 9)).astype(np.int64)
    tokens[np.arange(9)[None, :] >= lengths[:, None]] = 0
    labels = rng.integers(0, CLASSES, size=6).astype(np.int64)
    return tokens, lengths, labels


# ---------------------------------------------------------------- PyTorch

class GRUClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, EMBED)
        self.gru = nn.GRU(EMBED, HIDDEN, num_layers=2, batch_first=True)
        self.classifier = nn.Linear(2 * HIDDEN, CLASSES)
        with torch.no_grad():
            self.embedding.weight.mul_(0.3)

    def forward(self, tokens, lengths):
        embedded = self.embedding(tokens) * math.sqrt(EMBED)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        packed_outputs, final = self.gru(packed)
        outputs, _ = pad_packed_sequence(packed_outputs, batch_first=True)
        average = outputs.sum(dim=1) / lengths[:, None]
        return self.classifier(torch.cat([final[-1], average], dim=1))


def left():
    torch.manual_seed(12)
    model = GRUClassifier()
    tokens, lengths, labels = (torch.from_numpy(a) for a in make_batch())
    criterion = nn.CrossEntropyLoss(label_smoothing=SMOOTHING)

    def loss_fn(tokens, lengths, labels):
        logits = model(tokens, lengths)
        return criterion(logits, labels)

    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=EPSILON)
    return stablenum_torch.program(loss_fn, tokens, lengths, labels, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX

GATES = ("reset", "update", "candidate")


def init_layer(key, inputs, hidden):
    layer = {}
    bound = 1 / math.sqrt(hidden)
    for gate in GATES:
        key, k1, k2, k3, k4 = jax.random.split(key, 5)
        layer[gate] = {
            "input_kernel": jax.random.uniform(k1, (inputs, hidden), minval=-bound, maxval=bound),
            "hidden_kernel": jax.random.uniform(k2, (hidden, hidden), minval=-bound, maxval=bound),
            "input_bias": jax.random.uniform(k3, (hidden,), minval=-bound, maxval=bound),
            "hidden_bias": jax.random.uniform(k4, (hidden,), minval=-bound, maxval=bound),
        }
    return layer


def init_params(key):
    keys = jax.random.split(key, 4)
    return {
        "embedding": 0.3 * jax.random.normal(keys[0], (VOCAB, EMBED)),
        "layers": [init_layer(keys[1], EMBED, HIDDEN), init_layer(keys[2], HIDDEN, HIDDEN)],
        "output": {"kernel": 0.2 * jax.random.normal(keys[3], (2 * HIDDEN, CLASSES)),
                   "bias": 0.1 * jnp.arange(1.0, CLASSES + 1)},
    }


def gru_cell(layer, state, x):
    def from_input(gate):
        return x @ layer[gate]["input_kernel"] + layer[gate]["input_bias"]

    def from_state(gate):
        return state @ layer[gate]["hidden_kernel"] + layer[gate]["hidden_bias"]

    reset = jax.nn.sigmoid(from_input("reset") + from_state("reset"))
    update = jax.nn.sigmoid(from_input("update") + from_state("update"))
    candidate = jnp.tanh(from_input("candidate") + reset * from_state("candidate"))
    return candidate + update * (state - candidate)


def run_layer(layer, inputs, alive):
    """inputs: (T, B, D), alive: (T, B); gives all states and the last one of every sequence."""
    def step(state, frame):
        x, keep = frame
        proposed = gru_cell(layer, state, x)
        state = jnp.where(keep[:, None], proposed, state)
        return state, state * keep[:, None]

    start = jnp.zeros((inputs.shape[1], HIDDEN), inputs.dtype)
    last, states = jax.lax.scan(step, start, (inputs, alive))
    return states, last


def classify(params, tokens, lengths):
    vectors = params["embedding"][tokens] * EMBED ** 0.5
    frames = jnp.swapaxes(vectors, 0, 1)
    alive = jnp.arange(tokens.shape[1])[:, None] < lengths[None, :]
    for layer in params["layers"]:
        frames, last = run_layer(layer, frames, alive)
    pooled = jnp.sum(frames, axis=0) / lengths[:, None]
    features = jnp.concatenate([last, pooled], axis=-1)
    return features @ params["output"]["kernel"] + params["output"]["bias"]


def smoothed_loss(params, tokens, lengths, targets):
    log_probs = jax.nn.log_softmax(classify(params, tokens, lengths))
    hard = jax.nn.one_hot(targets, CLASSES, dtype=log_probs.dtype)
    soft = hard * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return -jnp.mean(jnp.sum(soft * log_probs, axis=-1))


def adam():
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jnp.zeros((), jnp.int32), zeros, zeros

    def update(grads, state, params=None):
        count, first, second = state
        count = count + 1
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, grads)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g ** 2, second, grads)
        rate1, rate2 = 1 - BETA1 ** count, 1 - BETA2 ** count

        def delta(m, v):
            denominator = jnp.sqrt(v / rate2) + EPSILON
            return -LEARNING_RATE * (m / rate1) / denominator

        return jax.tree.map(delta, first, second), (count, first, second)

    return optax.GradientTransformation(init, update)


def right():
    params = init_params(jax.random.key(13))
    tokens, lengths, targets = (jnp.asarray(a) for a in make_batch())
    hand_written = adam()
    return stablenum_jax.program(smoothed_loss, params, tokens, lengths, targets, optimizer=hand_written)
