import numpy as np
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
import optax
from sklearn.datasets import load_linnerud

# joint regression of the three physiological targets with a full residual covariance
raw = load_linnerud()
X = np.asarray(raw.data, dtype=np.float32)
Y = np.asarray(raw.target, dtype=np.float32)
X = (X - X.mean(0)) / X.std(0)
Y = (Y - Y.mean(0)) / Y.std(0)
D = Y.shape[1]
X, Y = jnp.asarray(X), jnp.asarray(Y)


def corr_cholesky(raw_vec):
    """unconstrained vector -> Cholesky factor of a correlation matrix"""
    L = jnp.eye(D)
    L = L.at[jnp.tril_indices(D, -1)].set(jnp.tanh(raw_vec))
    for col in range(1, D):
        left = jnp.sum(L[:, :col] ** 2, axis=1)
        L = L.at[:, col].multiply(jnp.sqrt(1.0 - left))
    return L


def mvn_logpdf(resid, log_tau, L):
    chol = jnp.exp(log_tau)[:, None] * L
    z = solve_triangular(chol, resid.T, lower=True)
    logdet = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(chol))))
    return -0.5 * jnp.sum(z ** 2, axis=0) - logdet - 0.5 * D * jnp.log(2 * jnp.pi)


def nll(params, x, y):
    mean = x @ params["W"] + params["b"]
    L = corr_cholesky(params["corr"])
    return -mvn_logpdf(y - mean, params["log_tau"], L).mean()


def diag_nll(params, x, y):
    mean = x @ params["W"] + params["b"]
    return -mvn_logpdf(y - mean, params["log_tau"], jnp.eye(D)).mean()


def fit(loss_fn, params, steps, lr):
    tx = optax.adam(lr)
    state = tx.init(params)

    @jax.jit
    def update(params, state):
        value, g = jax.value_and_grad(loss_fn)(params, X, Y)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, value

    for it in range(steps):
        params, state, value = update(params, state)
        if it % 5 == 0 or it == steps - 1:
            print(f"   it {it:3d}  nll/sample {float(value):.4f}")
        if not np.isfinite(float(value)):
            raise FloatingPointError(f"nll became {float(value)} in iteration {it}")
    return params


if __name__ == "__main__":
    key = jax.random.PRNGKey(1)
    kw, kc = jax.random.split(key)
    p = {
        "W": 0.1 * jax.random.normal(kw, (X.shape[1], D)),
        "b": jnp.zeros(D),
        "log_tau": jnp.zeros(D),
        "corr": 0.2 * jax.random.normal(kc, (D * (D - 1) // 2,)),
    }
    print("stage 1: independent residuals")
    p = fit(diag_nll, p, 25, 3e-2)
    print("stage 2: correlated residuals")
    p = fit(nll, p, 60, 1e-2)
    L = corr_cholesky(p["corr"])
    print("residual correlation\n", np.asarray(L @ L.T).round(2))
