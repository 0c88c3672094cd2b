"""Word-level language model, an LSTM with a recurrent projection and truncated back-propagation; torch.nn.LSTM and equinox."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn as nn
import torch.nn.functional as F

import stablenum_jax
import stablenum_torch

VOCAB = 29
EMBED, CELLS = 10, 16
LENGTH, SEGMENT = 12, 4
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.5, 0.9, 0.25


def make_tokens():
    rng = np.random.default_rng(31)
    return rng.integers(0, VOCAB, size=(4, LENGTH))


# ---------------------------------------------------------------- PyTorch


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, EMBED)
        self.lstm = nn.LSTM(EMBED, CELLS, proj_size=EMBED, batch_first=True)
        self.decoder_bias = nn.Parameter(0.1 * torch.randn(VOCAB))

    def forward(self, tokens):
        state = None
        outputs = []
        for segment in tokens.split(SEGMENT, dim=1):
            hidden, state = self.lstm(self.embed(segment), state)
            state = tuple(part.detach() for part in state)
            outputs.append(hidden)
        hidden = torch.cat(outputs, dim=1)
        return F.linear(hidden, self.embed.weight, self.decoder_bias)


class ClippedSGD(torch.optim.SGD):
    """SGD that clips the gradient of all parameters together before each step."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def left():
    torch.manual_seed(6)
    model = LanguageModel()
    optimizer = ClippedSGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)

    def loss_fn(tokens):
        logits = model(tokens)[:, :-1]
        labels = tokens[:, 1:]
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))

    return stablenum_torch.program(loss_fn, torch.as_tensor(make_tokens()), model=model, optimizer=optimizer)


# ---------------------------------------------------------------- equinox


class ProjectedLSTMCell(eqx.Module):
    weight_ih: jax.Array
    weight_hh: jax.Array
    weight_hr: jax.Array
    bias_ih: jax.Array
    bias_hh: jax.Array

    def __init__(self, n_in, n_cells, n_out, *, key):
        keys = jax.random.split(key, 5)
        bound = n_cells**-0.5

        def uniform(k, *shape):
            return jax.random.uniform(k, shape, minval=-bound, maxval=bound)

        self.weight_ih = uniform(keys[0], 4 * n_cells, n_in)
        self.weight_hh = uniform(keys[1], 4 * n_cells, n_out)
        self.weight_hr = uniform(keys[2], n_out, n_cells)
        self.bias_ih = uniform(keys[3], 4 * n_cells)
        self.bias_hh = uniform(keys[4], 4 * n_cells)

    def initial(self):
        n_out, n_cells = self.weight_hr.shape
        return jnp.zeros(n_out, self.weight_hr.dtype), jnp.zeros(n_cells, self.weight_hr.dtype)

    def __call__(self, carry, x):
        h, c = carry
        gates = self.weight_ih @ x + self.bias_ih + self.weight_hh @ h + self.bias_hh
        i, f, g, o = jnp.split(gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = self.weight_hr @ (jax.nn.sigmoid(o) * jnp.tanh(c))
        return (h, c), h


class LSTMLanguageModel(eqx.Module):
    embed: eqx.nn.Embedding
    cell: ProjectedLSTMCell
    decoder_bias: jax.Array

    def __init__(self, key):
        k_embed, k_cell, k_bias = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCAB, EMBED, key=k_embed)
        self.cell = ProjectedLSTMCell(EMBED, CELLS, EMBED, key=k_cell)
        self.decoder_bias = 0.1 * jax.random.normal(k_bias, (VOCAB,))

    def __call__(self, tokens):
        """The logits of one sequence of tokens."""
        vectors = jax.vmap(self.embed)(tokens).reshape(-1, SEGMENT, EMBED)

        def run_segment(carry, xs):
            carry = jax.lax.stop_gradient(carry)
            return jax.lax.scan(lambda state, x: self.cell(state, x), carry, xs)

        _, hidden = jax.lax.scan(run_segment, self.cell.initial(), vectors)
        hidden = hidden.reshape(-1, EMBED)
        return hidden @ self.embed.weight.T + self.decoder_bias


def clip_by_total_norm(max_norm, eps=1e-6):
    """torch.nn.utils.clip_grad_norm_ as a gradient transformation."""

    def clip(grads, params=None):
        total = optax.tree.norm(grads)
        factor = jnp.minimum(1.0, max_norm / (total + eps))
        return jax.tree.map(lambda g: g * factor, grads)

    return optax.stateless(clip)


def sequence_nll(model, tokens):
    log_probs = jax.nn.log_softmax(model(tokens)[:-1], axis=-1)
    targets = tokens[1:]
    return -jnp.take_along_axis(log_probs, targets[:, None], axis=-1).mean()


def right():
    model = LSTMLanguageModel(jax.random.key(7))
    optimizer = optax.chain(
        clip_by_total_norm(MAX_NORM),
        optax.sgd(LEARNING_RATE, momentum=MOMENTUM, nesterov=True),
    )

    def loss_fn(model, tokens):
        return jnp.mean(jax.vmap(sequence_nll, in_axes=(None, 0))(model, tokens))

    return stablenum_jax.program(loss_fn, model, jnp.asarray(make_tokens()), optimizer=optimizer)
