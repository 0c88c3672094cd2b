"""Newton's method for a little tanh network, damping raised until the factorisation goes through."""
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve
from sklearn.datasets import load_diabetes

X, y = load_diabetes(return_X_y=True)
X = (X / X.std(0))[:, [2, 3, 8]].astype(np.float32)
y = (y / y.mean()).astype(np.float32)
Xtr, ytr, Xva, yva = X[:330], y[:330], X[330:], y[330:]

k1, k2 = jax.random.split(jax.random.PRNGKey(0))
p0 = {"w": 0.5 * jax.random.normal(k1, (3, 6)), "b": jnp.zeros(6),
      "v": 0.3 * jax.random.normal(k2, (6,)), "c": jnp.array(1.0), "shape": jnp.array(2.0)}
theta, unflatten = ravel_pytree(p0)


def gamma_nll(theta, x, t):
    """Gamma likelihood with identity link: only defined where the mean is positive."""
    p = unflatten(theta)
    mu = jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["c"]
    k = p["shape"]
    ok = jnp.all(mu > 0) & (k > 0)
    mu_s, k_s = jnp.where(mu > 0, mu, 1.0), jnp.where(k > 0, k, 1.0)
    ll = k_s * jnp.log(k_s / mu_s) + (k_s - 1) * jnp.log(t) - k_s * t / mu_s - jax.lax.lgamma(k_s)
    return jnp.where(ok, -ll.mean(), jnp.inf)


objective = lambda th: gamma_nll(th, Xtr, ytr) + 1e-3 * jnp.sum(th ** 2)
value_grad = jax.jit(jax.value_and_grad(objective))
hessian = jax.jit(jax.hessian(objective))
value = jax.jit(objective)


@jax.jit
def newton_direction(H, g, mu):
    c = jnp.linalg.cholesky(H + mu * jnp.eye(H.shape[0]))
    return -cho_solve((c, True), g)


mu, failed, best = 1e-4, 0, np.inf
for it in range(25):
    f, g = value_grad(theta)
    H = hessian(theta)
    tries = 0
    while True:
        d = newton_direction(H, g, mu)
        tries += 1
        if bool(jnp.isfinite(d).all()):
            trial = float(value(theta + d))
            if trial < float(f):
                break
        failed += 1
        mu = max(4 * mu, 1e-4)
        if mu > 1e8:
            break
    if mu > 1e8:
        print("no further decrease, stop")
        break
    theta = theta + d
    mu = mu / 6
    va = float(gamma_nll(theta, Xva, yva))
    best = min(best, va)
    if it % 4 == 0:
        print(f"it {it:2d} f {trial:.5f} val {va:.5f} best {best:.5f} tries {tries} mu {mu:.1e} |g| {float(jnp.linalg.norm(g)):.5f}")
print("rejected factorisations / steps:", failed, " final", round(float(value(theta)), 5))
assert np.isfinite(best)
