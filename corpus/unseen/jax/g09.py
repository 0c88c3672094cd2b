# float16 gradients with dynamic loss scaling, float32 master weights.
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler


class Scaler(NamedTuple):
    scale: jax.Array
    good_steps: jax.Array


data = load_breast_cancer()
x_all = StandardScaler().fit_transform(data.data).astype(np.float16)
y_all = data.target.astype(np.float32)


def net(p, x):
    h = jnp.tanh(x @ p["w1"] + p["b1"])
    return (h @ p["w2"] + p["b2"])[:, 0]


def scaled_loss(p16, x, y, scale):
    logits = net(p16, x).astype(jnp.float32)
    loss = optax.sigmoid_binary_cross_entropy(logits, y).mean()
    return loss * scale, loss


tx = optax.adam(2e-3)


@jax.jit
def step(master, opt_state, sc, x, y):
    half = jax.tree_util.tree_map(lambda a: a.astype(jnp.float16), master)
    grads, loss = jax.grad(scaled_loss, has_aux=True)(half, x, y, sc.scale)
    grads = jax.tree_util.tree_map(
        lambda g: g.astype(jnp.float32) / sc.scale, grads)
    finite = jnp.all(jnp.array([jnp.isfinite(g).all()
                                for g in jax.tree_util.tree_leaves(grads)]))
    updates, new_opt = tx.update(grads, opt_state, master)
    new_master = optax.apply_updates(master, updates)

    def keep(new, old):
        return jax.tree_util.tree_map(
            lambda a, b: jnp.where(finite, a, b), new, old)

    grow = finite & (sc.good_steps >= 50)
    scale = jnp.where(finite, jnp.where(grow, sc.scale * 2, sc.scale),
                      sc.scale / 2)
    good = jnp.where(finite & ~grow, sc.good_steps + 1, 0)
    return (keep(new_master, master), keep(new_opt, opt_state),
            Scaler(scale, good), loss, finite)


k1, k2 = jax.random.split(jax.random.PRNGKey(4))
master = {"w1": 0.3 * jax.random.normal(k1, (30, 16)), "b1": jnp.zeros(16),
          "w2": 0.3 * jax.random.normal(k2, (16, 1)), "b2": jnp.zeros(1)}
opt_state = tx.init(master)
scaler = Scaler(jnp.array(2.0**24), jnp.array(0))
rng, skipped = np.random.default_rng(1), 0
for it in range(300):
    idx = rng.integers(0, len(x_all), 64)
    master, opt_state, scaler, loss, ok = step(
        master, opt_state, scaler, x_all[idx], y_all[idx])
    skipped += int(not ok)
    if it % 50 == 0:
        print(f"{it} loss={loss:.4f} scale={scaler.scale:.0f} skipped={skipped}")
