"""Posterior sampling for a small neural regressor with preconditioner-free SGLD and an ensemble of thinned draws."""
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

N, BATCH, NOISE, BURN, TOTAL = 200, 40, 0.5, 150, 400
rng = np.random.default_rng(0)


def dataset(n):
    x = rng.uniform(-3, 3, (n, 1))
    y = np.sin(1.5 * x) + 0.3 * x + NOISE * rng.normal(size=(n, 1))
    return jnp.asarray(x), jnp.asarray(y)


x_train, y_train = dataset(N)
x_test, y_test = dataset(500)


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (1, 24)), "b1": jnp.linspace(-3, 3, 24),
            "w2": jax.random.normal(k2, (24, 1)) * 0.2, "b2": jnp.zeros(1)}


def net(p, x):
    return jnp.tanh(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


theta, unravel = ravel_pytree(init(jax.random.PRNGKey(0)))


def potential(theta, x, y):
    """Unbiased minibatch estimate of -log posterior."""
    p = unravel(theta)
    log_lik = -0.5 * jnp.sum((net(p, x) - y) ** 2) / NOISE ** 2
    log_prior = -0.5 * jnp.sum(theta ** 2)
    return -(N / x.shape[0]) * log_lik - log_prior


@jax.jit
def sgld_step(theta, key, eps):
    k1, k2 = jax.random.split(key)
    idx = jax.random.choice(k1, N, (BATCH,), replace=False)
    u, grad = jax.value_and_grad(potential)(theta, x_train[idx], y_train[idx])
    noise = jax.random.normal(k2, theta.shape)
    return theta - 0.5 * eps * grad + jnp.sqrt(eps) * noise, u, jnp.linalg.norm(grad)


def step_size(i):
    return 1.2e-4 * (1.0 + i / 20.0) ** -0.33


predict = jax.jit(lambda th: net(unravel(th), x_test))
key, draws = jax.random.PRNGKey(1), []
for i in range(TOTAL):
    key, sub = jax.random.split(key)
    theta, u, gnorm = sgld_step(theta, sub, step_size(i))
    if i >= BURN and i % 5 == 0:
        draws.append(predict(theta))
    if i % 40 == 0:
        print(f"iter {i:4d}  U(theta) {float(u):9.2f}  |grad| {float(gnorm):9.2f}  |theta| {float(jnp.linalg.norm(theta)):.3f}")

draws = jnp.stack(draws)
log_p = -0.5 * ((draws - y_test) / NOISE) ** 2 - jnp.log(NOISE) - 0.5 * jnp.log(2 * jnp.pi)
nll = -jnp.mean(jax.scipy.special.logsumexp(log_p, axis=0) - jnp.log(len(draws)))
print("last draw rmse", float(jnp.sqrt(jnp.mean((draws[-1] - y_test) ** 2))))
print("ensemble rmse", float(jnp.sqrt(jnp.mean((draws.mean(0) - y_test) ** 2))), "noise level", NOISE)
print("FINAL", float(nll))
