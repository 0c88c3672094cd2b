# GRU-D like imputation model on vitals with missing readings (NaN = not measured), plain JAX + lax.scan
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

warnings.filterwarnings("ignore", message="Mean of empty slice")
N, T, F, H = 256, 20, 3, 16


def make_patients(seed=0):
    rng = np.random.default_rng(seed)
    sev = rng.normal(size=(N, 1, 1))
    t = np.linspace(0, 1, T)[None, :, None]
    base = np.array([80.0, 37.0, 97.0])
    amp = np.array([12.0, 0.6, -2.0])
    x = base + amp * sev * t + rng.normal(size=(N, T, F)) * np.array([5.0, 0.2, 1.0])
    y = (sev[:, 0, 0] + 0.3 * rng.normal(size=N) > 0).astype(np.float32)
    x[rng.random(x.shape) < 0.45] = np.nan
    x[rng.random((N, F)).repeat(T, 0).reshape(N, T, F) < 0.06] = np.nan
    return x.astype(np.float32), y


x_all, y_all = make_patients()
mu, sd = np.nanmean(x_all[:192], axis=(0, 1)), np.nanstd(x_all[:192], axis=(0, 1))
x_all = (x_all - mu) / sd
per_patient = np.nanmean(x_all, axis=1)
print("patients with a channel never measured:", int(np.isnan(per_patient).any(1).sum()))


def init(key):
    k = jax.random.split(key, 4)
    return {
        "gates": jax.random.normal(k[0], (2 * F + H, 2 * H)) * 0.2, "bg": jnp.zeros(2 * H),
        "cand": jax.random.normal(k[1], (2 * F + H, H)) * 0.2, "bc": jnp.zeros(H),
        "decay": jnp.zeros(F), "out": jax.random.normal(k[2], (H,)) * 0.2, "bo": jnp.zeros(()),
    }


def encode(p, seq):
    def cell(carry, xt):
        h, last, gap = carry
        seen = ~jnp.isnan(xt)
        filled = jnp.where(seen, xt, 0.0)
        gamma = jnp.exp(-jax.nn.softplus(p["decay"]) * gap)
        value = jnp.where(seen, filled, gamma * last)
        inp = jnp.concatenate([value, seen.astype(jnp.float32)])
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([inp, h]) @ p["gates"] + p["bg"]), 2)
        c = jnp.tanh(jnp.concatenate([inp, r * h]) @ p["cand"] + p["bc"])
        h = (1 - z) * h + z * c
        return (h, jnp.where(seen, filled, last), jnp.where(seen, 1.0, gap + 1.0)), xt - gamma * last

    (h, _, _), surprise = jax.lax.scan(cell, (jnp.zeros(H), jnp.zeros(F), jnp.ones(F)), seq)
    return h @ p["out"] + p["bo"], jax.lax.stop_gradient(surprise)


def loss_fn(p, x, y):
    logit, surprise = jax.vmap(encode, in_axes=(None, 0))(p, x)
    return optax.sigmoid_binary_cross_entropy(logit, y).mean(), jnp.nanmean(jnp.abs(surprise))


tx = optax.adam(1e-2)


@jax.jit
def step(p, s, x, y):
    (l, extra), g = jax.value_and_grad(loss_fn, has_aux=True)(p, x, y)
    u, s = tx.update(g, s)
    return optax.apply_updates(p, u), s, l, extra


params = init(jax.random.PRNGKey(1))
state = tx.init(params)
rng = np.random.default_rng(1)
history = np.full(80, np.nan)
for i in range(80):
    b = rng.choice(192, 48, replace=False)
    params, state, l, extra = step(params, state, x_all[b], y_all[b])
    history[i] = float(l)
    if i % 16 == 0:
        print(f"{i:3d} bce {history[i]:.4f} mean so far {np.nanmean(history):.4f} surprise {float(extra):.3f}")
test_logit, _ = jax.vmap(encode, in_axes=(None, 0))(params, x_all[192:])
acc = float(((test_logit > 0) == (y_all[192:] > 0.5)).mean())
print("test accuracy", round(acc, 3))
assert acc > 0.7 and np.isfinite(history).all()
