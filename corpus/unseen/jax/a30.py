"""Movie ratings: biased matrix factorisation; the whole run is one lax.scan."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

USERS, ITEMS, RANK = 200, 120, 10
BATCH = 512
STEPS = 200
LEARNING_RATE = 0.05 * BATCH / 16

rng = np.random.default_rng(17)
u_true, v_true = rng.standard_normal((USERS, 3)), rng.standard_normal((ITEMS, 3))
uu, ii = rng.integers(0, USERS, 8000), rng.integers(0, ITEMS, 8000)
rating = np.clip(np.round(3.4 + (u_true[uu] * v_true[ii]).sum(1) * 0.7), 1, 5)
uu, ii, rating = jnp.asarray(uu), jnp.asarray(ii), jnp.asarray(rating, jnp.float32)


def predict(p, u, i):
    dot = jnp.sum(p["user"][u] * p["item"][i], axis=-1)
    return p["mean"] + p["bu"][u] + p["bi"][i] + dot


def loss_fn(p, u, i, r):
    err = predict(p, u, i) - r
    reg = 1e-4 * (jnp.sum(p["user"] ** 2) + jnp.sum(p["item"] ** 2))
    return jnp.mean(err ** 2) + reg


tx = optax.sgd(LEARNING_RATE, momentum=0.9, nesterov=True)


def train(key, p):
    def body(carry, k):
        p, s = carry
        sel = jax.random.randint(k, (BATCH,), 0, uu.shape[0])
        loss, g = jax.value_and_grad(loss_fn)(p, uu[sel], ii[sel], rating[sel])
        upd, s = tx.update(g, s, p)
        return (optax.apply_updates(p, upd), s), loss

    (p, _), losses = jax.lax.scan(body, (p, tx.init(p)), jax.random.split(key, STEPS))
    return p, losses


k0, k1, k2 = jax.random.split(jax.random.PRNGKey(0), 3)
params = {
    "user": 0.3 * jax.random.normal(k0, (USERS, RANK)),
    "item": 0.3 * jax.random.normal(k1, (ITEMS, RANK)),
    "bu": jnp.zeros(USERS), "bi": jnp.zeros(ITEMS), "mean": jnp.float32(3.0),
}
params, losses = jax.jit(train)(k2, params)
for s in list(range(0, 12)) + list(range(20, STEPS, 30)):
    print(f"step {s:3d} mse {float(losses[s]):.4g}")
print("rmse on everything", float(jnp.sqrt(jnp.mean((predict(params, uu, ii) - rating) ** 2))))
