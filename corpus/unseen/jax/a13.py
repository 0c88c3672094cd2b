"""Breast-cancer logistic regression with an L-BFGS written from the textbook."""
from collections import deque
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

X, y = load_breast_cancer(return_X_y=True)
X = jnp.asarray(StandardScaler().fit_transform(X), jnp.float32)
y = jnp.asarray(y, jnp.float32)
flat0, unravel = ravel_pytree({"w": jnp.zeros(X.shape[1]), "b": jnp.zeros(())})


@jax.jit
def objective(flat):
    p = unravel(flat)
    logit = X @ p["w"] + p["b"]
    return jnp.mean(jax.nn.softplus(logit) - y * logit) + 1e-2 * jnp.sum(p["w"] ** 2)


value_grad = jax.jit(jax.value_and_grad(objective))


def direction(g, memory):
    q = g
    alphas = []
    for s, yv in reversed(memory):
        rho = 1.0 / jnp.dot(yv, s)
        a = rho * jnp.dot(s, q)
        alphas.append((rho, a))
        q = q - a * yv
    if memory:
        s, yv = memory[-1]
        q = q * (jnp.dot(s, yv) / jnp.dot(yv, yv))
    for (s, yv), (rho, a) in zip(memory, reversed(alphas)):
        b = rho * jnp.dot(yv, q)
        q = q + s * (a - b)
    return -q


def line_search(x, f, g, d):
    t = 1.0
    slope = float(jnp.dot(g, d))
    for _ in range(30):
        if float(objective(x + t * d)) <= float(f) + 1e-4 * t * slope:
            break
        t *= 0.5
    return t


x = flat0
f, g = value_grad(x)
memory = deque(maxlen=6)
for it in range(60):
    d = direction(g, memory)
    t = line_search(x, f, g, d)
    x_new = x + t * d
    f_new, g_new = value_grad(x_new)
    memory.append((x_new - x, g_new - g))
    x, f, g = x_new, f_new, g_new
    if it % 4 == 0:
        print(f"iter {it:3d}  f = {float(f):.7f}  |g| = {float(jnp.linalg.norm(g)):.2e}  step = {t:g}")
params = unravel(x)
acc = np.mean((np.asarray(X @ params["w"] + params["b"]) > 0) == np.asarray(y > 0.5))
print("train accuracy", acc, "weights finite:", bool(jnp.isfinite(x).all()))
