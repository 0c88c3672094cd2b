from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Scaler(NamedTuple):
    scale: jax.Array
    good: jax.Array


class State(NamedTuple):
    params: list
    opt: tuple
    scaler: Scaler


def init_params(key, sizes):
    out = []
    for k, a, b in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:]):
        out.append({"w": jax.random.normal(k, (a, b)) * jnp.sqrt(2.0 / a), "b": jnp.zeros(b)})
    return out


def forward(params, x):
    for p in params[:-1]:
        x = jax.nn.relu(x @ p["w"] + p["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def to_half(tree):
    return jax.tree.map(lambda a: a.astype(jnp.float16), tree)


tx = optax.adam(1e-3)


@jax.jit
def train_step(state, x, y):
    def scaled(params):
        logits = forward(to_half(params), x.astype(jnp.float16)).astype(jnp.float32)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss * state.scaler.scale, loss

    grads, loss = jax.grad(scaled, has_aux=True)(state.params)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scaler.scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    updates, new_opt = tx.update(grads, state.opt, state.params)
    new_params = optax.apply_updates(state.params, updates)

    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    good = jnp.where(finite, state.scaler.good + 1, 0)
    grow = good >= 50
    scale = jnp.where(finite, jnp.where(grow, state.scaler.scale * 2, state.scaler.scale), state.scaler.scale / 2)
    scaler = Scaler(jnp.clip(scale, 1.0, 2.0 ** 24), jnp.where(grow, 0, good))
    return State(keep(new_params, state.params), keep(new_opt, state.opt), scaler), loss, finite


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]
    params = init_params(jax.random.PRNGKey(0), [64, 128, 128, 10])
    state = State(params, tx.init(params), Scaler(jnp.float32(2.0 ** 16), jnp.int32(0)))
    skipped = 0
    for i in range(300):
        s = rng.choice(tr, 64)
        state, loss, ok = train_step(state, x[s], y[s])
        skipped += int(not ok)
        if i % 50 == 0 or i == 299:
            print(f"step {i} loss {float(loss):.4f} scale {float(state.scaler.scale):.0f} skipped {skipped}")
    acc = (forward(state.params, x[te]).argmax(-1) == y[te]).mean()
    print("test accuracy", float(acc))


main()
