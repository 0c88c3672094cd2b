"""GRU encoder-decoder with additive attention and teacher forcing: nn.GRU and GRUCell in PyTorch, scans in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import stablenum_jax
import stablenum_torch

SRC_VOCAB, TGT_VOCAB, EMB, HIDDEN, ATTN = 23, 19, 12, 20, 14
PAD, BOS, EOS = 0, 1, 2
LENGTH_WEIGHT = 0.05
RHO, EPS, MAX_NORM = 0.95, 1e-6, 0.5


def make_batch():
    rng = np.random.default_rng(8)
    source = np.full((5, 9), PAD)
    target = np.full((5, 8), PAD)
    lengths = np.array([9, 5, 7, 3, 8])
    for i, (s, t) in enumerate(zip(lengths, (6, 4, 8, 5, 7))):
        source[i, :s] = rng.integers(3, SRC_VOCAB, s)
        target[i, :t] = [BOS, *rng.integers(3, TGT_VOCAB, t - 2), EOS]
    return source.astype(np.int32), lengths.astype(np.int32), target.astype(np.int32)


# ------------------------------------------------------------- PyTorch


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SRC_VOCAB, EMB)
        self.rnn = nn.GRU(EMB, HIDDEN, batch_first=True)

    def forward(self, src, src_len):
        packed = pack_padded_sequence(
            self.embedding(src), src_len.cpu(), batch_first=True, enforce_sorted=False
        )
        outputs, hidden = self.rnn(packed)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=src.shape[1])
        return outputs, hidden[0]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_query = nn.Linear(HIDDEN, ATTN, bias=False)
        self.W_key = nn.Linear(HIDDEN, ATTN)
        self.v = nn.Linear(ATTN, 1, bias=False)

    def forward(self, hidden, keys, values, mask):
        energy = self.v(torch.tanh(self.W_query(hidden).unsqueeze(1) + keys)).squeeze(-1)
        weights = F.softmax(energy.masked_fill(~mask, float("-inf")), dim=1)
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TGT_VOCAB, EMB)
        self.attention = Attention()
        self.cell = nn.GRUCell(EMB + HIDDEN, HIDDEN)
        self.out = nn.Linear(2 * HIDDEN, TGT_VOCAB)

    def forward(self, token, hidden, keys, values, mask):
        context = self.attention(hidden, keys, values, mask)
        hidden = self.cell(torch.cat([self.embedding(token), context], dim=-1), hidden)
        return self.out(torch.cat([hidden, context], dim=-1)), hidden


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.bridge = nn.Linear(HIDDEN, HIDDEN)
        self.decoder = Decoder()
        self.length_head = nn.Linear(HIDDEN, 1)

    def forward(self, src, src_len, tgt):
        values, last = self.encoder(src, src_len)
        keys = self.decoder.attention.W_key(values)
        mask = src != PAD
        hidden = torch.tanh(self.bridge(last))
        steps = []
        for t in range(tgt.shape[1] - 1):
            scores, hidden = self.decoder(tgt[:, t], hidden, keys, values, mask)
            steps.append(scores)
        return torch.stack(steps, dim=1), self.length_head(last.detach()).squeeze(-1)


# ------------------------------------------------------------- JAX


def init_dense(key, fan_in, fan_out):
    return jax.random.normal(key, (fan_in, fan_out)) / np.sqrt(fan_in)


def init_gru(key, inputs, hidden):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    return {
        "wx": init_dense(k1, inputs, 3 * hidden),
        "wh": init_dense(k2, hidden, 3 * hidden),
        "bx": 0.1 * jax.random.normal(k3, (3 * hidden,)),
        "bh": 0.1 * jax.random.normal(k4, (3 * hidden,)),
    }


def init_params(key):
    k = iter(jax.random.split(key, 16))
    return {
        "source_table": jax.random.normal(next(k), (SRC_VOCAB, EMB)),
        "target_table": jax.random.normal(next(k), (TGT_VOCAB, EMB)),
        "encoder": init_gru(next(k), EMB, HIDDEN),
        "decoder": init_gru(next(k), EMB + HIDDEN, HIDDEN),
        "bridge": {"w": init_dense(next(k), HIDDEN, HIDDEN), "b": jnp.zeros(HIDDEN)},
        "attention": {
            "query": init_dense(next(k), HIDDEN, ATTN),
            "key": init_dense(next(k), HIDDEN, ATTN),
            "key_bias": jnp.zeros(ATTN),
            "v": init_dense(next(k), ATTN, 1)[:, 0],
        },
        "readout": {"w": init_dense(next(k), 2 * HIDDEN, TGT_VOCAB), "b": jnp.zeros(TGT_VOCAB)},
        "length": {"w": init_dense(next(k), HIDDEN, 1)[:, 0], "b": jnp.zeros(())},
    }


def gru(p, h, x):
    """Gates in the order of torch: reset, update, new."""
    xr, xz, xn = jnp.split(x @ p["wx"] + p["bx"], 3, axis=-1)
    hr, hz, hn = jnp.split(h @ p["wh"] + p["bh"], 3, axis=-1)
    r = jax.nn.sigmoid(xr + hr)
    z = jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return (1.0 - z) * n + z * h


def encode(params, source):
    xs = params["source_table"][source].swapaxes(0, 1)
    real = (source != PAD).T

    def step(h, inputs):
        x, keep = inputs
        new = gru(params["encoder"], h, x)
        h = jnp.where(keep[:, None], new, h)
        return h, h

    start = jnp.zeros((source.shape[0], HIDDEN), xs.dtype)
    return jax.lax.scan(step, start, (xs, real))


def attend(p, h, memory, projected, real):
    hidden = jnp.tanh(projected + h @ p["query"])
    scores = jnp.where(real, hidden @ p["v"], -1e9)
    weights = jax.nn.softmax(scores, axis=0)
    return jnp.einsum("sb,sbh->bh", weights, memory)


def forward(params, source, inputs):
    last, memory = encode(params, source)
    attention = params["attention"]
    projected = memory @ attention["key"] + attention["key_bias"]
    real = (source != PAD).T

    def step(h, x):
        context = attend(attention, h, memory, projected, real)
        h = gru(params["decoder"], h, jnp.concatenate([x, context], axis=-1))
        return h, (h, context)

    h0 = jnp.tanh(last @ params["bridge"]["w"] + params["bridge"]["b"])
    xs = params["target_table"][inputs.T]
    _, (hs, contexts) = jax.lax.scan(step, h0, xs)
    features = jnp.concatenate([hs, contexts], axis=-1).swapaxes(0, 1)
    logits = features @ params["readout"]["w"] + params["readout"]["b"]
    lengths = jax.lax.stop_gradient(last) @ params["length"]["w"] + params["length"]["b"]
    return logits, lengths


def token_loss(logits, labels):
    valid = labels != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * valid) / jnp.sum(valid)


def clip_gradients(max_norm):
    def update(grads, state, params=None):
        norm = optax.global_norm(grads)
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / (norm + 1e-6)), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


# ------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0, rho=RHO, eps=EPS)
    optimizer.register_step_pre_hook(
        lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM), None)[1]
    )
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    source, lengths, target = make_batch()

    def loss_fn(src, src_len, tgt):
        logits, predicted = model(src, src_len, tgt)
        nll = criterion(logits.reshape(-1, TGT_VOCAB), tgt[:, 1:].reshape(-1))
        tgt_len = (tgt != PAD).sum(dim=1).to(predicted.dtype)
        return nll + LENGTH_WEIGHT * F.mse_loss(predicted, tgt_len)

    return stablenum_torch.program(
        loss_fn,
        torch.tensor(source).long(),
        torch.tensor(lengths).long(),
        torch.tensor(target).long(),
        model=model,
        optimizer=optimizer,
    )


def right():
    params = init_params(jax.random.key(4))
    source, lengths, target = make_batch()

    def loss_fn(params, source, lengths, target):
        inputs, labels = target[:, :-1], target[:, 1:]
        logits, predicted = forward(params, source, inputs)
        error = predicted - jnp.sum(target != PAD, axis=1)
        return token_loss(logits, labels) + LENGTH_WEIGHT * jnp.mean(error**2)

    optimizer = optax.chain(clip_gradients(MAX_NORM), optax.adadelta(1.0, rho=RHO, eps=EPS))
    return stablenum_jax.program(
        loss_fn, params, *map(jnp.asarray, (source, lengths, target)), optimizer=optimizer
    )
