# Fit a radial-velocity curve (one planet) with gradient descent.
# Kepler's equation is solved by Newton in a fori_loop, gradients through an implicit jvp.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from functools import partial

rs = np.random.RandomState(11)


@jax.custom_jvp
def kepler(M, e):
    def body(_, E):
        return E - (E - e * jnp.sin(E) - M) / (1.0 - e * jnp.cos(E))
    return jax.lax.fori_loop(0, 12, body, M + e * jnp.sin(M))


@kepler.defjvp
def kepler_jvp(primals, tangents):
    M, e = primals
    dM, de = tangents
    E = kepler(M, e)
    return E, (dM + jnp.sin(E) * de) / (1.0 - e * jnp.cos(E))


def rv_model(p, t):
    period = jnp.exp(p["log_period"])
    K = jnp.exp(p["log_K"])
    ecc = jnp.sqrt(p["h"] ** 2 + p["k"] ** 2)
    omega = jnp.arctan2(p["h"], p["k"])
    M = 2 * jnp.pi * (t - p["t_peri"]) / period
    E = kepler(M, ecc)
    f = 2.0 * jnp.arctan2(jnp.sqrt(1 + ecc) * jnp.sin(E / 2), jnp.sqrt(1 - ecc) * jnp.cos(E / 2))
    return K * (jnp.cos(f + omega) + ecc * jnp.cos(omega)) + p["gamma"]


truth = dict(log_period=jnp.log(14.2), log_K=jnp.log(38.0), h=jnp.array(0.12), k=jnp.array(0.2),
             t_peri=jnp.array(3.1), gamma=jnp.array(-4.0))
t_obs = jnp.array(np.sort(rs.uniform(0, 60, 80)), dtype=jnp.float32)
sigma = jnp.array(rs.uniform(1.0, 3.0, 80), dtype=jnp.float32)
rv_obs = rv_model(truth, t_obs) + sigma * jnp.array(rs.randn(80), dtype=jnp.float32)


def initial_guess(t, v):
    """circular orbit from a coarse sinusoid scan"""
    best = (np.inf, None)
    t, v = np.asarray(t), np.asarray(v)
    for P in np.linspace(8, 25, 120):
        A = np.stack([np.cos(2 * np.pi * t / P), np.sin(2 * np.pi * t / P), np.ones_like(t)], 1)
        c, *_ = np.linalg.lstsq(A, v, rcond=None)
        res = np.sum((A @ c - v) ** 2)
        if res < best[0]:
            best = (res, (P, c))
    P, c = best[1]
    print("scan period %.2f amplitude %.1f" % (P, np.hypot(c[0], c[1])))
    return {
        "log_period": jnp.log(P),
        "log_K": jnp.log(np.hypot(c[0], c[1])),
        "h": jnp.zeros(()),
        "k": jnp.zeros(()),
        "t_peri": jnp.array(np.arctan2(c[1], c[0]) * P / (2 * np.pi)),
        "gamma": jnp.array(c[2]),
    }


def neg_log_like(p, t, v, s):
    r = (v - rv_model(p, t)) / s
    return 0.5 * jnp.mean(r ** 2)


params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), initial_guess(t_obs, rv_obs))
tx = optax.adam(optax.cosine_decay_schedule(2e-2, 300))
state = tx.init(params)


@partial(jax.jit, donate_argnums=(0, 1))
def update(params, state):
    nll, g = jax.value_and_grad(neg_log_like)(params, t_obs, rv_obs, sigma)
    upd, state = tx.update(g, state)
    return optax.apply_updates(params, upd), state, nll


print("chi2/2 of the truth", float(neg_log_like(truth, t_obs, rv_obs, sigma)))
for i in range(60):
    params, state, nll = update(params, state)
    if i % 10 == 0:
        ecc = np.hypot(params["h"], params["k"])
        print(i, "nll %.3f" % nll, "period %.3f" % np.exp(params["log_period"]), "ecc %.3f" % ecc)
assert np.isfinite(float(nll)), "fit diverged"
