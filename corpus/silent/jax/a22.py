# One-step-ahead forecast of a noisy oscillation; the whole training loop is one lax.scan.
import jax
import jax.numpy as jnp
import numpy as np
import optax

HID, T, BATCH, STEPS = 24, 30, 32, 300


def series(key):
    k1, k2, k3, k4 = jax.random.split(key, 4)
    f = jax.random.uniform(k1, (BATCH, 1), minval=0.2, maxval=0.6)
    p = jax.random.uniform(k2, (BATCH, 1), maxval=6.28)
    a = jax.random.uniform(k3, (BATCH, 1), minval=1.0, maxval=3.0)
    return a * jnp.sin(f * jnp.arange(T + 1) + p) + 0.05 * jax.random.normal(k4, (BATCH, T + 1))


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {"x": jax.random.normal(k1, (1, 4 * HID)) * 0.5,
            "h": jax.random.normal(k2, (HID, 4 * HID)) / np.sqrt(HID),
            "b": jnp.zeros(4 * HID).at[HID:2 * HID].set(1.0),
            "out": jax.random.normal(k3, (HID, 1)) * 2.0}


def forecast(p, s):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x[:, None] @ p["x"] + h @ p["h"] + p["b"], 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), (h @ p["out"])[:, 0]

    zero = jnp.zeros((s.shape[0], HID))
    return jax.lax.scan(cell, (zero, zero), s[:, :-1].T)[1].T


def loss_fn(p, s):
    return jnp.mean((forecast(p, s) - s[:, 1:]) ** 2)


tx = optax.chain(optax.clip_by_global_norm(2.0), optax.adam(5e-3))


def body(carry, key):
    p, st = carry
    loss, g = jax.value_and_grad(loss_fn)(p, series(key))
    up, st = tx.update(g, st)
    return (optax.apply_updates(p, up), st), (loss, optax.global_norm(g))


params = init(jax.random.PRNGKey(0))
keys = jax.random.split(jax.random.PRNGKey(1), STEPS)
(params, _), (losses, norms) = jax.jit(lambda c, k: jax.lax.scan(body, c, k))((params, tx.init(params)), keys)
for i in range(0, STEPS, 25):
    print(f"steps {i:3d}-{i + 24:3d} loss {float(losses[i:i + 25].mean()):.4f} grad norm {float(norms[i:i + 25].mean()):.2f}")
print("last loss", float(losses[-1]))
