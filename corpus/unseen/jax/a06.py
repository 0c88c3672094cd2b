"""Mixed precision MLP with a hand-made dynamic loss scale."""
from typing import NamedTuple
import jax
import jax.numpy as jnp
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler


class Scaler(NamedTuple):
    scale: jax.Array
    good: jax.Array


class Train(NamedTuple):
    params: list
    mom: list
    scaler: Scaler
    skipped: jax.Array


def init(key, sizes):
    out = []
    for i, o in zip(sizes[:-1], sizes[1:]):
        key, k = jax.random.split(key)
        out.append({"w": jax.random.normal(k, (i, o)) * (2.0 / i) ** 0.5, "b": jnp.zeros(o)})
    return out


def apply(params, x):
    h = x.astype(jnp.float16)
    for n, layer in enumerate(params):
        h = h @ layer["w"].astype(jnp.float16) + layer["b"].astype(jnp.float16)
        if n < len(params) - 1:
            h = jax.nn.relu(h)
    return h


def scaled_loss(params, x, y, scale):
    logits = apply(params, x).astype(jnp.float32)
    loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1))
    return loss * scale, loss


@jax.jit
def step(s, x, y):
    grads, loss = jax.grad(scaled_loss, has_aux=True)(s.params, x, y, s.scaler.scale)
    grads = jax.tree.map(lambda g: g / s.scaler.scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    mom = jax.tree.map(lambda m, g: 0.9 * m + g, s.mom, grads)
    new = jax.tree.map(lambda p, m: p - 0.02 * m, s.params, mom)
    keep = lambda a, b: jax.tree.map(lambda u, v: jnp.where(finite, u, v), a, b)
    good = jnp.where(finite, s.scaler.good + 1, 0)
    grow = good >= 50
    scale = jnp.where(finite, jnp.where(grow, s.scaler.scale * 2, s.scaler.scale), s.scaler.scale / 2)
    good = jnp.where(grow, 0, good)
    return Train(keep(new, s.params), keep(mom, s.mom), Scaler(scale, good), s.skipped + ~finite), loss, finite


wine = load_wine()
X = jnp.asarray(StandardScaler().fit_transform(wine.data), jnp.float32)
y = jnp.asarray(wine.target)
params = init(jax.random.PRNGKey(0), [13, 64, 32, 3])
state = Train(params, jax.tree.map(jnp.zeros_like, params),
              Scaler(jnp.float32(2.0 ** 26), jnp.int32(0)), jnp.int32(0))
key = jax.random.PRNGKey(5)
for it in range(160):
    key, k = jax.random.split(key)
    sel = jax.random.choice(k, len(X), (48,), replace=False)
    state, loss, ok = step(state, X[sel], y[sel])
    if not ok:
        print(f"step {it}: gradient overflow, scale -> {float(state.scaler.scale):.0f}")
    elif it % 20 == 0:
        print(f"step {it}: loss {float(loss):.4f} scale {float(state.scaler.scale):.0f}")
acc = jnp.mean(apply(state.params, X).argmax(-1) == y)
print("skipped", int(state.skipped), "accuracy", float(acc))
