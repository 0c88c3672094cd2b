# %% diabetes progression, small MLP, hand-written SGD
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

X, y = load_diabetes(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
y = (y - y.mean()) / y.std()
X = X.astype(np.float32)
y = y.astype(np.float32)

rng = np.random.default_rng(0)
order = rng.permutation(len(X))
tr, te = order[:350], order[350:]

# %% parameters
k1, k2 = jax.random.split(jax.random.PRNGKey(1))
params = {
    "W1": jax.random.normal(k1, (10, 32)) * np.sqrt(1 / 10),
    "b1": jnp.zeros(32),
    "W2": jax.random.normal(k2, (32, 1)) * np.sqrt(1 / 32),
    "b2": jnp.zeros(1),
}


def net(p, x):
    h = jnp.tanh(x @ p["W1"] + p["b1"])
    return h @ p["W2"] + p["b2"]


def mse(p, x, t):
    return jnp.mean((net(p, x) - t) ** 2)


@jax.jit
def sgd(p, x, t):
    value, g = jax.value_and_grad(mse)(p, x, t)
    return jax.tree.map(lambda a, b: a - 0.05 * b, p, g), value


# %% train
for step in range(300):
    idx = rng.choice(tr, 64, replace=False)
    params, value = sgd(params, jnp.asarray(X[idx]), jnp.asarray(y[idx]))
    if step % 50 == 0 or step == 299:
        print(f"step {step:4d}  loss {float(value):.4f}")

# %% evaluate
pred = np.asarray(net(params, X[te])).ravel()
r2 = 1 - np.mean((pred - y[te]) ** 2) / np.var(y[te])
print("test R2 %.3f" % r2)
