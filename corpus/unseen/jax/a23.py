"""Poisson GLM by gradient descent with a backtracking line search; the trial points may overflow."""
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(2)
N, P = 400, 6
X = np.c_[np.ones(N), rng.standard_normal((N, P - 1)) * np.array([1, 3, 10, 1, 5])]
beta_true = np.array([0.5, 0.4, -0.2, 0.08, 0.3, 0.1])
y = rng.poisson(np.exp(X @ beta_true))
X, y = jnp.asarray(X, jnp.float32), jnp.asarray(y, jnp.float32)


@jax.jit
def nll(beta):
    eta = X @ beta
    return jnp.mean(jnp.exp(eta) - y * eta) + 1e-4 * beta @ beta


grad = jax.jit(jax.grad(nll))


def backtrack(beta, f, g, t):
    rejected = 0
    while True:
        trial = beta - t * g
        ft = nll(trial)
        if jnp.isfinite(ft) and ft <= f - 0.3 * t * (g @ g):
            return trial, ft, t, rejected
        rejected += int(not jnp.isfinite(ft))
        t *= 0.5


beta = jnp.zeros(P)
f = nll(beta)
t = 100.0
best = (jnp.inf, beta)
total_rejected = 0
for it in range(120):
    g = grad(beta)
    if float(jnp.linalg.norm(g)) < 1e-3:
        break
    beta, f, t, rej = backtrack(beta, f, g, t)
    total_rejected += rej
    if f < best[0]:
        best = (f, beta)
    t = min(4.0 * t, 100.0) if it % 20 == 19 else 2.0 * t
    if it % 15 == 0:
        print(f"iter {it:3d} nll {float(f):9.4f} step {t:.2e} overflowed trials so far {total_rejected}")
print("best", float(best[0]), "beta", np.round(np.asarray(best[1]), 3))
assert np.isfinite(np.asarray(best[1])).all()
