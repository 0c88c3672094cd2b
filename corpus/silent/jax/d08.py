import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

HALF = jnp.float16


class LossScaler:
    def __init__(self, init=2.0 ** 18, growth_interval=100):
        self.scale = init
        self.growth_interval = growth_interval
        self.good_steps = 0
        self.skipped = 0

    def update(self, finite):
        if finite:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale *= 2.0
                self.good_steps = 0
        else:
            self.scale /= 2.0
            self.good_steps = 0
            self.skipped += 1


def init_params(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (m, n)) * np.sqrt(2.0 / m), jnp.zeros(n))
        for k, m, n in zip(keys, sizes[:-1], sizes[1:])
    ]


def apply(params, x):
    x = x.astype(HALF)
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w.astype(HALF) + b.astype(HALF))
    w, b = params[-1]
    return (x @ w.astype(HALF) + b.astype(HALF)).astype(jnp.float32)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


tx = optax.adam(2e-3)


@jax.jit
def train_step(params, opt_state, x, y, scale):
    scaled, grads = jax.value_and_grad(lambda p: loss_fn(p, x, y) * scale)(params)
    grads = jax.tree_util.tree_map(lambda g: g / scale, grads)
    leaves = jax.tree_util.tree_leaves(grads)
    finite = functools.reduce(jnp.logical_and, [jnp.isfinite(g).all() for g in leaves])
    updates, new_state = tx.update(grads, opt_state)
    new_params = optax.apply_updates(params, updates)
    select = lambda new, old: jnp.where(finite, new, old)
    params = jax.tree_util.tree_map(select, new_params, params)
    opt_state = jax.tree_util.tree_map(select, new_state, opt_state)
    return params, opt_state, scaled / scale, finite


def main():
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]

    params = init_params(jax.random.PRNGKey(8), [64, 128, 128, 10])
    opt_state = tx.init(params)
    scaler = LossScaler()
    for step in range(350):
        b = rng.choice(tr, 64)
        params, opt_state, loss, finite = train_step(params, opt_state, x[b], y[b], scaler.scale)
        scaler.update(bool(finite))
        if step % 50 == 0:
            print(f"step {step} loss {float(loss):.4f} scale {scaler.scale:.0f} skipped {scaler.skipped}")
    acc = (apply(params, x[te]).argmax(-1) == y[te]).mean()
    print("test accuracy", float(acc), "skipped steps", scaler.skipped)


main()
