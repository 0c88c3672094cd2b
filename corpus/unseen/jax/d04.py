"""Bayesian regression with HMC (dual-averaging warm-up), then posterior mean predictions."""
import jax
import jax.numpy as jnp
import numpy as np
from functools import partial
from sklearn.datasets import load_diabetes

X, y = load_diabetes(return_X_y=True)
X = (X / X.std(0)).astype(np.float32)
y = ((y - y.mean()) / y.std()).astype(np.float32)
X, y = jnp.asarray(X[:200]), jnp.asarray(y[:200])
DIM = X.shape[1] + 1


def log_density(z):
    w, sigma = z[:-1], jnp.exp(z[-1])
    resid = (y - X @ w) / sigma
    return (-0.5 * jnp.sum(resid ** 2) - len(y) * jnp.log(sigma)
            - 0.5 * jnp.sum(w ** 2) - 0.5 * z[-1] ** 2 + z[-1])


grad_logp = jax.grad(log_density)


@partial(jax.jit, static_argnums=(3,))
def hmc_step(key, z, eps, n_leap=12):
    k1, k2 = jax.random.split(key)
    p0 = jax.random.normal(k1, z.shape)

    def leap(i, state):
        q, p = state
        p = p + 0.5 * eps * grad_logp(q)
        q = q + eps * p
        p = p + 0.5 * eps * grad_logp(q)
        return q, p

    q, p = jax.lax.fori_loop(0, n_leap, leap, (z, p0))
    h0 = -log_density(z) + 0.5 * jnp.sum(p0 ** 2)
    h1 = -log_density(q) + 0.5 * jnp.sum(p ** 2)
    accept_prob = jnp.minimum(1.0, jnp.exp(h0 - h1))
    take = jax.random.uniform(k2) < accept_prob
    return jnp.where(take, q, z), accept_prob, take


class DualAveraging:
    def __init__(self, eps0, target=0.8, gamma=0.05, t0=10.0, kappa=0.75):
        self.mu = np.log(10 * eps0)
        self.target, self.gamma, self.t0, self.kappa = target, gamma, t0, kappa
        self.h_bar, self.log_eps_bar, self.m = 0.0, 0.0, 0
        self.eps = eps0

    def update(self, accept_prob):
        self.m += 1
        w = 1.0 / (self.m + self.t0)
        self.h_bar = (1 - w) * self.h_bar + w * (self.target - float(accept_prob))
        log_eps = self.mu - np.sqrt(self.m) / self.gamma * self.h_bar
        eta = self.m ** (-self.kappa)
        self.log_eps_bar = eta * log_eps + (1 - eta) * self.log_eps_bar
        self.eps = float(np.exp(log_eps))

    def final(self):
        return float(np.exp(self.log_eps_bar))


key = jax.random.PRNGKey(11)
z = 0.1 * jax.random.normal(key, (DIM,))
tuner = DualAveraging(eps0=0.009)
for i in range(30):
    key, sub = jax.random.split(key)
    z, a, took = hmc_step(sub, z, tuner.eps, 12)
    tuner.update(a)
    if i % 5 == 0:
        print(f"warmup {i:2d} logp {float(log_density(z)):10.2f} moved {bool(took)}")

eps, draws, rate = tuner.final(), [], 0.0
for i in range(30):
    key, sub = jax.random.split(key)
    z, a, took = hmc_step(sub, z, eps, 12)
    draws.append(z)
    rate += float(a) / 30
draws = jnp.stack(draws)
print("step size", eps, "mean acceptance", rate)
pred = X @ draws[:, :-1].mean(0)
print("posterior sd of w:", np.array(draws[:, :-1].std(0)).round(3))
print("train R2:", float(1 - jnp.mean((y - pred) ** 2)))
assert np.isfinite(rate) and np.isfinite(eps), "sampler did not adapt"
