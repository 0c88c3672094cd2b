# Reptile on sensor curves. Readings go missing (nan), a few stations send saturated (inf) values: those updates are skipped.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

rng = np.random.RandomState(12)


class Curve(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(24)(x))
        h = nn.tanh(nn.Dense(24)(h))
        return nn.Dense(1)(h)[..., 0]


def make_station(i):
    amp, ph = rng.uniform(0.5, 1.5), rng.uniform(0, np.pi)
    x = rng.uniform(-3, 3, (24, 1)).astype(np.float32)
    y = amp * np.sin(x[:, 0] + ph) + 0.05 * rng.randn(24)
    y[rng.rand(24) < 0.25] = np.nan
    if i % 9 == 4:
        y[rng.randint(24)] = np.inf
    if i % 13 == 6:
        y[:] = np.nan
    return x, y.astype(np.float32)


model = Curve()
params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, 1)))
INNER = 5


def masked_mse(p, x, y):
    there = ~jnp.isnan(y)
    target = jnp.where(there, y, 0.0)
    err = jnp.where(there, model.apply(p, x) - target, 0.0)
    return jnp.sum(err ** 2) / jnp.maximum(there.sum(), 1)


@jax.jit
def adapt(p, x, y):
    def body(q, _):
        loss, g = jax.value_and_grad(masked_mse)(q, x, y)
        return jax.tree.map(lambda a, b: a - 0.05 * b, q, g), loss
    return jax.lax.scan(body, p, None, length=INNER)


outer = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=5)
state = outer.init(params)


@jax.jit
def meta_update(p, state, adapted):
    pseudo_grad = jax.tree.map(lambda a, b: a - b, p, adapted)
    upd, state = outer.update(pseudo_grad, state, p)
    return optax.apply_updates(p, upd), state


def report(p, stations):
    scores = []
    for x, y in stations:
        q, _ = adapt(p, x[:12], y[:12])
        use = np.isfinite(y[12:])
        pred = np.asarray(model.apply(q, x[12:]))
        scores.append(np.mean((pred[use] - y[12:][use]) ** 2) if use.any() else np.nan)
    return np.array(scores)


held_out = [make_station(i) for i in (0, 1, 2, 6, 7, 8)]
best, patience = np.inf, 0
for it in range(240):
    x, y = make_station(it)
    adapted, losses = adapt(params, x, y)
    params, state = meta_update(params, state, adapted)
    if it % 40 == 39:
        s = report(params, held_out)
        best = min(best, np.nanmean(s))
        print(f"it {it:3d} last inner loss {float(losses[-1]):.3f} held-out {s.round(3)} best {best:.4f} skipped {int(state.total_notfinite)}")
assert all(bool(jnp.isfinite(l).all()) for l in jax.tree.leaves(params))
print("done, skipped", int(state.total_notfinite), "updates")
