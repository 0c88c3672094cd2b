"""Half precision training with float32 master weights and a dynamic loss scale."""
from typing import NamedTuple
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_wine

HALF = jnp.float16


class Scale(NamedTuple):
    value: jnp.ndarray
    good: jnp.ndarray


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def net(p, x):
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    h = jax.nn.relu(h @ p["w2"] + p["b2"])
    return h @ p["w3"] + p["b3"]


def scaled_loss(master, x, y, scale):
    p = cast(master, HALF)
    logits = net(p, x.astype(HALF)).astype(jnp.float32)
    ll = jax.nn.log_softmax(logits)
    loss = -jnp.mean(jnp.take_along_axis(ll, y[:, None], axis=1))
    return loss * scale, loss


@jax.jit
def step(master, mom, scale, x, y):
    (_, loss), g = jax.value_and_grad(scaled_loss, has_aux=True)(master, x, y, scale.value)
    g = jax.tree.map(lambda a: a / scale.value, g)
    ok = jnp.all(jnp.array([jnp.all(jnp.isfinite(a)) for a in jax.tree.leaves(g)]))
    new_mom = jax.tree.map(lambda m, a: 0.9 * m + a, mom, g)
    new_master = jax.tree.map(lambda p, m: p - 0.05 * m, master, new_mom)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
    good = jnp.where(ok, scale.good + 1, 0)
    grow = good >= 50
    value = jnp.where(ok, jnp.where(grow, scale.value * 2, scale.value), scale.value / 2)
    return keep(new_master, master), keep(new_mom, mom), Scale(value, jnp.where(grow, 0, good)), loss, ok


wine = load_wine()
X = (wine.data - wine.data.mean(0)) / wine.data.std(0)
X, Y = jnp.asarray(X, jnp.float32), jnp.asarray(wine.target)
k = jax.random.split(jax.random.PRNGKey(5), 3)
master = {"w1": jax.random.normal(k[0], (13, 64)) * 0.35, "b1": jnp.zeros(64),
          "w2": jax.random.normal(k[1], (64, 64)) * 0.18, "b2": jnp.zeros(64),
          "w3": jax.random.normal(k[2], (64, 3)) * 0.15, "b3": jnp.zeros(3)}
mom = jax.tree.map(jnp.zeros_like, master)
scale = Scale(jnp.float32(2.0**22), jnp.int32(0))
order = np.random.default_rng(0)
skipped = 0
for i in range(200):
    idx = order.choice(len(Y), 64, replace=False)
    master, mom, scale, loss, ok = step(master, mom, scale, X[idx], Y[idx])
    skipped += int(not ok)
    if i % 20 == 0:
        print(f"{i:4d} loss {float(loss):.4f} scale 2^{int(np.log2(float(scale.value)))} skipped {skipped}")
acc = jnp.mean(net(master, X).argmax(1) == Y)
print("accuracy", float(acc), "skipped", skipped)
