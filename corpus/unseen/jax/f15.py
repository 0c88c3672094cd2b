"""Takagi-Sugeno fuzzy regression (ANFIS style) on the diabetes data, triangular membership functions."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.cluster import KMeans
from sklearn.datasets import load_diabetes

RULES = 6
COLS = [2, 3, 7, 8]


@jax.custom_vjp
def t_norm(mu):
    """product over the last axis"""
    return jnp.prod(mu, axis=-1)


def t_norm_fwd(mu):
    out = jnp.prod(mu, axis=-1)
    return out, (mu, out)


def t_norm_bwd(res, g):
    mu, out = res
    return ((g * out)[..., None] / mu,)


t_norm.defvjp(t_norm_fwd, t_norm_bwd)


class FuzzyRegressor:
    def __init__(self, n_rules, n_in):
        self.n_rules, self.n_in = n_rules, n_in

    def init(self, key, x):
        km = KMeans(self.n_rules, n_init=3, random_state=0).fit(np.asarray(x))
        spread = 1.5 * np.ptp(np.asarray(x), axis=0)
        return {
            "center": jnp.asarray(km.cluster_centers_, jnp.float32),
            "log_width": jnp.log(jnp.tile(jnp.asarray(spread, jnp.float32), (self.n_rules, 1))),
            "w": 0.1 * jax.random.normal(key, (self.n_rules, self.n_in)),
            "b": jnp.zeros(self.n_rules),
        }

    def memberships(self, p, x):
        dist = jnp.abs(x[:, None, :] - p["center"])
        return jnp.maximum(1.0 - dist / jnp.exp(p["log_width"]), 0.0)

    def __call__(self, p, x):
        fire = t_norm(self.memberships(p, x))
        share = (fire + 1e-5) / jnp.sum(fire + 1e-5, axis=1, keepdims=True)
        local = x @ p["w"].T + p["b"]
        return jnp.sum(share * local, axis=1), share


data = load_diabetes()
X = data.data[:, COLS]
X = (X - X.mean(0)) / X.std(0)
y = (data.target - data.target.mean()) / data.target.std()
perm = np.random.RandomState(4).permutation(len(X))
X, y = jnp.asarray(X[perm], jnp.float32), jnp.asarray(y[perm], jnp.float32)
Xtr, ytr, Xva, yva = X[:340], y[:340], X[340:], y[340:]

model = FuzzyRegressor(RULES, len(COLS))
params = model.init(jax.random.PRNGKey(0), Xtr)
tx = optax.multi_transform(
    {"shape": optax.adam(4e-2), "local": optax.adam(2e-2)},
    {"center": "shape", "log_width": "shape", "w": "local", "b": "local"})
opt_state = tx.init(params)


def objective(p, x, t):
    pred, share = model(p, x)
    sharp = -jnp.mean(jnp.sum(share * jnp.log(share), axis=1))
    return jnp.mean((pred - t) ** 2) + 0.1 * sharp


@jax.jit
def fit_step(p, s, x, t):
    loss, g = jax.value_and_grad(objective)(p, x, t)
    upd, s = tx.update(g, s, p)
    return optax.apply_updates(p, upd), s, loss


rs = np.random.RandomState(0)
for it in range(60):
    idx = rs.choice(len(Xtr), 96, replace=False)
    params, opt_state, loss = fit_step(params, opt_state, Xtr[idx], ytr[idx])
    if it % 6 == 0:
        pred, share = model(params, Xva)
        r2 = 1 - float(jnp.mean((pred - yva) ** 2) / jnp.var(yva))
        print(f"it {it:2d} loss {float(loss):.4f} val r2 {r2:.3f} rules in use {np.round(np.asarray(share.mean(0)), 2)}")
print("widths", np.round(np.exp(np.asarray(params["log_width"])).mean(1), 2))
