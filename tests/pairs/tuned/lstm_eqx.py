"""Sequence tagger: an LSTM with fixed dropout masks and warm-up. PyTorch original and Equinox port (lax.scan)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, EMBED, HIDDEN, TAGS, LENGTH, PAD = 30, 12, 16, 7, 8, -1
KEEP, LOSS_SCALE, PEAK, WARMUP = 0.75, 256.0, 0.25, 8


def make_batch():
    rng = np.random.default_rng(77)
    words = rng.integers(0, VOCAB, size=(4, LENGTH))
    lengths = np.array([8, 5, 7, 3])
    valid = np.arange(LENGTH) < lengths[:, None]
    tags = np.where(valid, rng.integers(0, TAGS, size=(4, LENGTH)), PAD)
    kept = (rng.random(size=(4, 1, HIDDEN)) < KEEP).astype(np.float32)
    return words, valid, tags, kept


# ---------------------------------------------------------------- PyTorch


class LSTMCell(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.input_proj = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x, state):
        h, c = state
        gates = self.input_proj(x) + self.recurrent(h)
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED)
        self.cell = LSTMCell(EMBED, HIDDEN)
        self.norm = nn.LayerNorm(2 * HIDDEN)
        self.out = nn.Linear(2 * HIDDEN, TAGS)

    def run(self, x, valid):
        h = c = x.new_zeros(x.shape[0], HIDDEN)
        outputs = []
        for t in range(x.shape[1]):
            h_new, c_new = self.cell(x[:, t], (h, c))
            keep = valid[:, t, None]
            h, c = torch.where(keep, h_new, h), torch.where(keep, c_new, c)
            outputs.append(h)
        return torch.stack(outputs, dim=1), h

    def forward(self, words, valid, kept):
        states, final = self.run(self.embed(words), valid)
        states = states * kept / KEEP
        context = final.unsqueeze(1).expand_as(states)
        features = torch.cat([states, context], dim=-1)
        return self.out(self.norm(features))


class UnscalingSGD(torch.optim.SGD):
    """Divides the gradients by the loss scale, then takes the step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(LOSS_SCALE)
        return super().step(closure)


def left():
    torch.manual_seed(10)
    model = Tagger()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    words, valid, tags, kept = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(words, valid, tags, kept):
        logits = model(words, valid, kept)
        loss = F.cross_entropy(logits.transpose(1, 2), tags, ignore_index=PAD)
        return loss * LOSS_SCALE

    optimizer = UnscalingSGD(model.parameters(), lr=PEAK, momentum=0.9, weight_decay=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    return stablenum_torch.program(loss_fn, words, valid, tags, kept, model=model, optimizer=optimizer)


# ---------------------------------------------------------------- Equinox


class EqxTagger(eqx.Module):
    embed: eqx.nn.Embedding
    cell: eqx.nn.LSTMCell
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embed = eqx.nn.Embedding(VOCAB, EMBED, key=k1)
        self.cell = eqx.nn.LSTMCell(EMBED, HIDDEN, key=k2)
        self.out = eqx.nn.Linear(2 * HIDDEN, TAGS, key=k3)
        scale, shift = 0.05 * jax.random.normal(k4, (2, 2 * HIDDEN))
        norm = eqx.nn.LayerNorm(2 * HIDDEN, eps=1e-5)
        self.norm = eqx.tree_at(lambda n: (n.weight, n.bias), norm, (1.0 + scale, shift))

    def encode(self, embedded, valid):
        def step(state, inputs):
            x, keep = inputs
            new = self.cell(x, state)
            state = jax.tree.map(lambda a, b: jnp.where(keep, a, b), new, state)
            return state, state[0]

        zeros = jnp.zeros(HIDDEN, embedded.dtype)
        (final, _), states = jax.lax.scan(step, (zeros, zeros), (embedded, valid))
        return states, final

    def __call__(self, words, valid, kept):
        embedded = jax.vmap(self.embed)(words)
        states, final = self.encode(embedded, valid)
        states = jnp.where(kept > 0, states / KEEP, 0.0)
        context = jnp.broadcast_to(final, states.shape)
        features = jnp.concatenate([states, context], axis=-1)
        normed = jax.vmap(self.norm)(features)
        return jax.vmap(self.out)(normed)


def tagging_loss(model, words, valid, tags, kept):
    logits = jax.vmap(model)(words, valid, kept)
    real = tags != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(real, tags, 0))
    mean = jnp.sum(jnp.where(real, losses, 0.0)) / jnp.sum(real)
    return LOSS_SCALE * mean


def make_optimizer():
    schedule = optax.linear_schedule(PEAK / WARMUP, PEAK, transition_steps=WARMUP - 1)
    unscale = optax.scale(1.0 / LOSS_SCALE)
    decay = optax.add_decayed_weights(1e-3)
    momentum = optax.trace(decay=0.9)
    return optax.chain(unscale, decay, momentum, optax.scale_by_learning_rate(schedule))


def right():
    words, valid, tags, kept = (jnp.asarray(a) for a in make_batch())
    model = EqxTagger(jax.random.key(15))
    return stablenum_jax.program(tagging_loss, model, words, valid, tags, kept, optimizer=make_optimizer())
