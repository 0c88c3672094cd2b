"""Small image net trained without a backward pass: directional derivatives along random tangents."""
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
N_DIRECTIONS, STEPS, LR0 = 8, 400, 0.06


def digits(n, rng):
    y = rng.integers(0, 4, n)
    x = np.zeros((n, 6, 6))
    x[y == 0, 1:5, 2] = 1
    x[y == 1, 2, 1:5] = 1
    idx = np.arange(1, 5)
    for i in np.flatnonzero(y == 2):
        x[i, idx, idx] = 1
    for i in np.flatnonzero(y == 3):
        x[i, idx, 5 - idx] = 1
    x = x + 0.35 * rng.normal(size=x.shape)
    return jnp.asarray(x.reshape(n, 36), jnp.float32), jnp.asarray(y)


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (36, 12)) * 0.25, "b1": jnp.zeros(12),
            "w2": jax.random.normal(k2, (12, 4)) * 0.3, "b2": jnp.zeros(4)}


def xent(params, x, y):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    logp = jax.nn.log_softmax(h @ params["w2"] + params["b2"])
    return -jnp.take_along_axis(logp, y[:, None], 1).mean()


def forward_gradient(params, key, x, y):
    leaves, tree = jax.tree_util.tree_flatten(params)
    keys = jax.random.split(key, len(leaves))
    v = tree.unflatten([jax.random.normal(k, l.shape) for k, l in zip(keys, leaves)])
    loss, dirderiv = jax.jvp(lambda p: xent(p, x, y), (params,), (v,))
    return loss, jax.tree_util.tree_map(lambda t: dirderiv * t, v)


@jax.jit
def step(params, key, x, y, lr):
    keys = jax.random.split(key, N_DIRECTIONS)
    losses, grads = jax.vmap(forward_gradient, in_axes=(None, 0, None, None))(params, keys, x, y)
    params = jax.tree_util.tree_map(lambda p, g: p - lr * g.mean(0), params, grads)
    return params, losses[0]


x_train, y_train = digits(4000, rng)
x_test, y_test = digits(1000, rng)
params = init(jax.random.PRNGKey(1))
key = jax.random.PRNGKey(2)
for it in range(STEPS):
    key, sub = jax.random.split(key)
    idx = rng.integers(0, 4000, 64)
    params, loss = step(params, sub, x_train[idx], y_train[idx], LR0 * np.exp(-it * 0.004))
    if it % 40 == 0:
        print(f"iter {it:3d} loss {loss:.4f}")

print("FINAL", float(xent(params, x_test, y_test)))
