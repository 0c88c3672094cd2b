"""Sequence classifier: hand-written LSTM in PyTorch against flax's OptimizedLSTMCell under linen.RNN."""
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import stablenum_jax
import stablenum_torch
import torch
import torch.nn as nn
import torch.nn.functional as F

INPUTS, HIDDEN, CLASSES, STEPS = 5, 10, 4, 8


def make_batch():
    rng = np.random.default_rng(61)
    frames = rng.normal(size=(6, STEPS, INPUTS)).astype(np.float32)
    labels = rng.integers(0, CLASSES, size=6)
    return frames, labels


# ---------------------------------------------------------------- PyTorch


class LSTM(nn.Module):
    """All gates from one product with the joined input and state."""

    def __init__(self):
        super().__init__()
        self.joint = nn.Linear(INPUTS + HIDDEN, 4 * HIDDEN)

    def forward(self, frames):
        h = c = torch.zeros(frames.shape[0], HIDDEN, dtype=frames.dtype)
        outputs = []
        for x in frames.unbind(dim=1):
            gates = self.joint(torch.cat([x, h], dim=1))
            squashed = torch.sigmoid(gates[:, : 3 * HIDDEN])
            i, f, o = squashed.split(HIDDEN, dim=1)
            g = gates[:, 3 * HIDDEN :].tanh()
            c = torch.addcmul(f * c, i, g)
            h = o * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = LSTM()
        self.score = nn.Linear(HIDDEN, 1, bias=False)
        self.head = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, frames):
        states = self.lstm(frames)
        weights = F.softmax(self.score(states), dim=1)
        attended = (weights * states).sum(dim=1)
        peak = states.amax(dim=1)
        return self.head(torch.cat([attended, peak], dim=1))


def left():
    torch.manual_seed(28)
    model = Classifier()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    frames, labels = (torch.from_numpy(a) for a in make_batch())

    def loss_fn(frames, labels):
        loss = F.nll_loss(F.log_softmax(model(frames), dim=-1), labels)
        penalty = sum((p**2).sum() for p in model.head.parameters())
        return loss + 1e-2 * penalty

    return stablenum_torch.program(loss_fn, frames, labels, model=model)


# ---------------------------------------------------------------- Flax


class FlaxClassifier(linen.Module):
    @linen.compact
    def __call__(self, frames):
        cell = linen.OptimizedLSTMCell(HIDDEN, param_dtype=frames.dtype, name="cell")
        states = linen.RNN(cell, name="rnn")(frames)
        scores = linen.Dense(1, use_bias=False, name="score")(states)[..., 0]
        attended = jnp.einsum("bt,bth->bh", jax.nn.softmax(scores), states)
        features = jnp.concatenate([attended, jnp.max(states, axis=1)], axis=-1)
        return linen.Dense(CLASSES, name="head")(features)


def right():
    frames, labels = (jnp.asarray(a) for a in make_batch())
    net = FlaxClassifier()
    params = net.init(jax.random.key(91), frames)["params"]
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(92), len(leaves))
    params = treedef.unflatten([p + 0.1 * jax.random.normal(k, p.shape) for p, k in zip(leaves, keys)])

    def loss_fn(params, frames, labels):
        logits = net.apply({"params": params}, frames)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        penalty = optax.global_norm(params["head"]) ** 2
        return loss + 0.01 * penalty

    return stablenum_jax.program(loss_fn, params, frames, labels)
