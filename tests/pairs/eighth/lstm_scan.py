"""BiLSTM tagger: nn.LSTM on packed sequences in PyTorch, plain JAX with lax.scan and masks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stablenum_jax
import stablenum_torch

WORDS, TAGS, EMB, HIDDEN, TIME = 31, 6, 12, 10, 9
PAD_TAG = -100
LR = 1e-3


def make_batch():
    rng = np.random.default_rng(13)
    lengths = np.array([5, 9, 3, 7], dtype=np.int32)
    words = rng.integers(1, WORDS, (4, TIME)).astype(np.int32)
    tags = rng.integers(0, TAGS, (4, TIME)).astype(np.int32)
    for row, n in enumerate(lengths):
        words[row, n:] = 0
        tags[row, n:] = PAD_TAG
    return words, tags, lengths


# ------------------------------------------------------------ PyTorch


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, EMB)
        self.lstm = nn.LSTM(EMB, HIDDEN, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * HIDDEN, TAGS)

    def forward(self, words, lengths):
        embedded = self.embedding(words)
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        output, _ = self.lstm(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=words.shape[1])
        return self.hidden2tag(output)


# ------------------------------------------------------------ JAX


def init_params(key):
    keys = jax.random.split(key, 10)
    bound = HIDDEN**-0.5

    def uniform(k, *shape):
        return jax.random.uniform(k, shape, minval=-bound, maxval=bound)

    def direction(ks):
        return {
            "wx": uniform(ks[0], EMB, 4 * HIDDEN),
            "wh": uniform(ks[1], HIDDEN, 4 * HIDDEN),
            "bx": uniform(ks[2], 4 * HIDDEN),
            "bh": uniform(ks[3], 4 * HIDDEN),
        }

    return {
        "embedding": jax.random.normal(keys[0], (WORDS, EMB)),
        "forward": direction(keys[1:5]),
        "backward": direction(keys[5:9]),
        "out": {"w": uniform(keys[9], 2 * HIDDEN, TAGS), "b": jnp.zeros(TAGS)},
    }


def lstm_cell(p, h, c, x):
    gates = x @ p["wx"] + p["bx"] + h @ p["wh"] + p["bh"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    c_new = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h_new = jax.nn.sigmoid(o) * jnp.tanh(c_new)
    return h_new, c_new


def run_lstm(p, xs, mask, reverse=False):
    """xs: [time, batch, features], mask: [time, batch]. The state stands still where the mask is False."""

    def step(carry, inputs):
        h, c = carry
        x, m = inputs
        h_new, c_new = lstm_cell(p, h, c, x)
        keep = m[:, None]
        h = jnp.where(keep, h_new, h)
        c = jnp.where(keep, c_new, c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], HIDDEN), xs.dtype)
    _, hs = jax.lax.scan(step, (zeros, zeros), (xs, mask), reverse=reverse)
    return hs * mask[:, :, None]


def tag_logits(params, words, lengths):
    mask = jnp.arange(words.shape[1])[:, None] < lengths[None, :]
    xs = params["embedding"][words].swapaxes(0, 1)
    ahead = run_lstm(params["forward"], xs, mask)
    back = run_lstm(params["backward"], xs, mask, reverse=True)
    hs = jnp.concatenate([ahead, back], axis=-1).swapaxes(0, 1)
    return hs @ params["out"]["w"] + params["out"]["b"]


def tag_loss(params, words, tags, lengths):
    log_probs = jax.nn.log_softmax(tag_logits(params, words, lengths))
    real = tags != PAD_TAG
    picked = jnp.take_along_axis(log_probs, jnp.where(real, tags, 0)[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked, where=real) / jnp.sum(real)


# ------------------------------------------------------------ the pair


def left():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=LR, momentum=0.9)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD_TAG)
    words, tags, lengths = (torch.from_numpy(a).long() for a in make_batch())

    def loss_fn(words, tags, lengths):
        scores = model(words, lengths)
        return criterion(scores.transpose(1, 2), tags)

    return stablenum_torch.program(loss_fn, words, tags, lengths, model=model, optimizer=optimizer)


def right():
    words, tags, lengths = make_batch()
    params = init_params(jax.random.key(4))
    optimizer = optax.rmsprop(LR, decay=0.99, eps=1e-8, momentum=0.9, eps_in_sqrt=False)
    return stablenum_jax.program(
        tag_loss, params, jnp.asarray(words), jnp.asarray(tags), jnp.asarray(lengths), optimizer=optimizer
    )
