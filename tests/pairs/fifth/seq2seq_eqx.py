"""Bidirectional LSTM encoder, attentive LSTM decoder: PyTorch original, equinox port (one example, vmapped, scans)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import stablenum_jax
import stablenum_torch

PAD, SRC_VOCAB, TGT_VOCAB, EMB, HID = 0, 24, 20, 12, 16
MAX_NORM = 0.2


def make_batch():
    rng = np.random.default_rng(3)
    src = rng.integers(1, SRC_VOCAB, size=(5, 9)).astype(np.int64)
    tgt = rng.integers(1, TGT_VOCAB, size=(5, 7)).astype(np.int64)
    for row, (s, t) in enumerate([(9, 7), (6, 5), (7, 7), (4, 6), (8, 4)]):
        src[row, s:] = PAD
        tgt[row, t:] = PAD
    return src, tgt


# ---------------------------------------------------------------- PyTorch

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SRC_VOCAB, EMB, padding_idx=PAD)
        self.rnn = nn.LSTM(EMB, HID, batch_first=True, bidirectional=True)
        self.bridge_h = nn.Linear(2 * HID, HID)
        self.bridge_c = nn.Linear(2 * HID, HID)

    def forward(self, src):
        embedded = self.embedding(src)
        outputs, (hidden, cell) = self.rnn(embedded)
        last_h = torch.cat([hidden[0], hidden[1]], dim=-1)
        last_c = torch.cat([cell[0], cell[1]], dim=-1)
        return outputs, torch.tanh(self.bridge_h(last_h)), self.bridge_c(last_c)


class BahdanauAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wa = nn.Linear(HID, HID, bias=False)
        self.Ua = nn.Linear(2 * HID, HID, bias=False)
        self.Va = nn.Linear(HID, 1, bias=False)

    def forward(self, query, keys, mask):
        energy = self.Va(torch.tanh(self.Wa(query).unsqueeze(1) + self.Ua(keys))).squeeze(-1)
        energy = energy.masked_fill(~mask, float("-inf"))
        weights = F.softmax(energy, dim=-1)
        return torch.bmm(weights.unsqueeze(1), keys).squeeze(1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TGT_VOCAB, EMB, padding_idx=PAD)
        self.attention = BahdanauAttention()
        self.rnn = nn.LSTMCell(EMB + 2 * HID, HID)
        self.out = nn.Linear(HID + 2 * HID, TGT_VOCAB)

    def forward(self, tokens, memory, h, c, mask):
        logits = []
        for t in range(tokens.size(1)):
            context = self.attention(h, memory, mask)
            step_in = torch.cat([self.embedding(tokens[:, t]), context], dim=-1)
            h, c = self.rnn(step_in, (h, c))
            logits.append(self.out(torch.cat([h, context], dim=-1)))
        return torch.stack(logits, dim=1)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()

    def forward(self, src, tgt_in):
        memory, h, c = self.encoder(src)
        return self.decoder(tgt_in, memory, h, c, src != PAD)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], MAX_NORM)
        return super().step(closure)


def left():
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = ClippedSGD(model.parameters(), lr=0.5, momentum=0.9)
    src, tgt = make_batch()

    def loss_fn(src, tgt):
        logits = model(src, tgt[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD)

    return stablenum_torch.program(loss_fn, torch.tensor(src), torch.tensor(tgt), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- JAX (equinox)

class Cell(eqx.Module):
    """An LSTM cell with PyTorch's two biases; the input half is projected by the caller."""
    weight_ih: jax.Array
    weight_hh: jax.Array
    bias_ih: jax.Array
    bias_hh: jax.Array

    def __init__(self, inputs, size, *, key):
        one, two = jax.random.split(key)
        bound = size ** -0.5
        self.weight_ih = jax.random.uniform(one, (4 * size, inputs), minval=-bound, maxval=bound)
        self.weight_hh = jax.random.uniform(two, (4 * size, size), minval=-bound, maxval=bound)
        self.bias_ih = jnp.zeros(4 * size)
        self.bias_hh = jnp.zeros(4 * size)

    def project(self, x):
        return x @ self.weight_ih.T + self.bias_ih

    def step(self, state, projected):
        h, c = state
        gates = projected + self.weight_hh @ h + self.bias_hh
        i, f, g, o = jnp.split(gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return h, c

    def zero(self):
        return jnp.zeros_like(self.weight_hh[0]), jnp.zeros_like(self.weight_hh[0])

    def run(self, xs, reverse=False):
        def body(state, projected):
            state = self.step(state, projected)
            return state, state[0]
        return jax.lax.scan(body, self.zero(), self.project(xs), reverse=reverse)


def lookup(table, ids):
    """Embedding whose padding row takes no gradient, as nn.Embedding(padding_idx=0)."""
    is_pad = (jnp.arange(table.shape[0]) == PAD)[:, None]
    table = jnp.where(is_pad, jax.lax.stop_gradient(table), table)
    return table[ids]


class Translator(eqx.Module):
    src_table: jax.Array
    tgt_table: jax.Array
    fwd: Cell
    bwd: Cell
    to_h: eqx.nn.Linear
    to_c: eqx.nn.Linear
    attn_query: eqx.nn.Linear
    attn_key: eqx.nn.Linear
    attn_energy: eqx.nn.Linear
    cell: Cell
    readout: eqx.nn.Linear

    def __init__(self, key):
        k = jax.random.split(key, 11)
        self.src_table = jax.random.normal(k[0], (SRC_VOCAB, EMB))
        self.tgt_table = jax.random.normal(k[1], (TGT_VOCAB, EMB))
        self.fwd = Cell(EMB, HID, key=k[2])
        self.bwd = Cell(EMB, HID, key=k[3])
        self.to_h = eqx.nn.Linear(2 * HID, HID, key=k[4])
        self.to_c = eqx.nn.Linear(2 * HID, HID, key=k[5])
        self.attn_query = eqx.nn.Linear(HID, HID, use_bias=False, key=k[6])
        self.attn_key = eqx.nn.Linear(2 * HID, HID, use_bias=False, key=k[7])
        self.attn_energy = eqx.nn.Linear(HID, "scalar", use_bias=False, key=k[8])
        self.cell = Cell(EMB + 2 * HID, HID, key=k[9])
        self.readout = eqx.nn.Linear(3 * HID, TGT_VOCAB, key=k[10])

    def encode(self, src):
        xs = lookup(self.src_table, src)
        (h_f, c_f), out_f = self.fwd.run(xs)
        (h_b, c_b), out_b = self.bwd.run(xs, reverse=True)
        memory = jnp.concatenate([out_f, out_b], axis=-1)
        start_h = jnp.tanh(self.to_h(jnp.concatenate([h_f, h_b])))
        start_c = self.to_c(jnp.concatenate([c_f, c_b]))
        return memory, (start_h, start_c)

    def __call__(self, src, tgt_in):
        memory, state = self.encode(src)
        keys = jax.vmap(self.attn_key)(memory)
        real = src != PAD

        def step(state, embedded):
            hidden = jnp.tanh(keys + self.attn_query(state[0]))
            energies = jax.vmap(self.attn_energy)(hidden)
            energies = jnp.where(real, energies, -jnp.inf)
            context = jax.nn.softmax(energies) @ memory
            projected = self.cell.project(jnp.concatenate([embedded, context]))
            state = self.cell.step(state, projected)
            return state, jnp.concatenate([state[0], context])

        _, features = jax.lax.scan(step, state, lookup(self.tgt_table, tgt_in))
        return jax.vmap(self.readout)(features)


def clip_like_torch(max_norm):
    def init(params):
        return optax.EmptyState()

    def update(updates, state, params=None):
        norm = optax.global_norm(updates)
        factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(init, update)


def right():
    model = Translator(jax.random.PRNGKey(0))
    src, tgt = make_batch()

    def loss_fn(model, src, tgt):
        logits = jax.vmap(model)(src, tgt[:, :-1])
        labels = tgt[:, 1:]
        keep = (labels != PAD).astype(logits.dtype)
        logp = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(logp, labels[..., None], axis=-1)[..., 0]
        return -(picked * keep).sum() / keep.sum()

    tx = optax.chain(clip_like_torch(MAX_NORM), optax.sgd(0.5, momentum=0.9))
    return stablenum_jax.program(loss_fn, model, src, tgt, optimizer=tx)
