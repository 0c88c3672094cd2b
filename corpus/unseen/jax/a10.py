"""GRU forecaster on sensor data with missing readings (NaN = not observed)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

H = 16


def load(seed=0, n=160, length=25, feats=3):
    rng = np.random.default_rng(seed)
    phase = rng.uniform(0, 2 * np.pi, (n, 1, 1))
    t = np.arange(length + 1)[None, :, None]
    x = np.sin(0.4 * t + phase + np.arange(feats)) * 3 + 10 + 0.1 * rng.standard_normal((n, length + 1, feats))
    x[rng.random(x.shape) < 0.2] = np.nan
    x[rng.random(n) < 0.05, :, 1] = np.nan
    return x.astype(np.float32)


def init(key, din):
    k = jax.random.split(key, 4)
    g = lambda kk, i, o: jax.random.normal(kk, (i, o)) / jnp.sqrt(i)
    return {"wz": g(k[0], din + H, H), "wr": g(k[1], din + H, H), "wh": g(k[2], din + H, H),
            "wo": g(k[3], H, din // 2), "bo": jnp.zeros(din // 2)}


def gru(p, x):
    def cell(h, u):
        hu = jnp.concatenate([u, h])
        z = jax.nn.sigmoid(hu @ p["wz"])
        r = jax.nn.sigmoid(hu @ p["wr"])
        c = jnp.tanh(jnp.concatenate([u, r * h]) @ p["wh"])
        h = (1 - z) * h + z * c
        return h, h @ p["wo"] + p["bo"]

    return jax.lax.scan(cell, jnp.zeros(H), x)[1]


def loss_fn(p, seq):
    seen = jnp.isfinite(seq)
    filled = jnp.where(seen, seq, 0.0)
    inputs = jnp.concatenate([filled, seen.astype(jnp.float32)], axis=-1)[:, :-1]
    pred = jax.vmap(gru, (None, 0))(p, inputs)
    target, mask = seq[:, 1:], seen[:, 1:]
    err = jnp.where(mask, pred - jnp.where(mask, target, 0.0), 0.0)
    return jnp.sum(err ** 2) / jnp.maximum(mask.sum(), 1)


raw = load()
mean = np.nanmean(raw, axis=(0, 1))
std = np.nanstd(raw, axis=(0, 1))
data = jnp.asarray((raw - mean) / std)
print("missing fraction", float(jnp.isnan(data).mean()))
params = init(jax.random.PRNGKey(0), 2 * data.shape[-1])
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(5e-3))
state = tx.init(params)


@jax.jit
def step(params, state, batch):
    loss, g = jax.value_and_grad(loss_fn)(params, batch)
    upd, state = tx.update(g, state)
    return optax.apply_updates(params, upd), state, loss


rng = np.random.default_rng(1)
for it in range(150):
    params, state, loss = step(params, state, data[rng.integers(0, len(data), 32)])
    if it % 25 == 0:
        print(it, float(loss))
per_series = jnp.nanmean(jnp.nanmean(jnp.abs(data), axis=1), axis=0)
print("mean |x| per feature", per_series, "final loss", float(loss_fn(params, data)))
