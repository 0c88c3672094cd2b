"""Track an index with few long-only positions: log-barrier method, Newton-free, backtracking line search in a while_loop."""
from functools import partial
import jax
import jax.numpy as jnp
import numpy as np


def market(seed=6, days=250, n=20):
    rng = np.random.default_rng(seed)
    factors = rng.normal(0.0003, 0.01, (days, 3))
    load = rng.uniform(0.2, 1.2, (3, n))
    r = factors @ load + rng.normal(0, 0.008, (days, n))
    true_w = np.where(rng.random(n) < 0.3, rng.random(n), 0.0)
    true_w /= true_w.sum()
    return jnp.asarray(r * 100, jnp.float32), jnp.asarray(r @ true_w * 100, jnp.float32), true_w


R, INDEX, W_TRUE = market()
N = R.shape[1]
CAP = 0.35


def tracking(w):
    return jnp.mean((R @ w - INDEX) ** 2)


def barrier(w):
    """-sum of logs inside the box 0 < w < CAP and below full investment, +inf outside"""
    slack = jnp.concatenate([w, CAP - w, (1.02 - w.sum())[None], (w.sum() - 0.98)[None]])
    inside = jnp.all(slack > 0)
    safe = jnp.where(slack > 0, slack, 1.0)
    return jnp.where(inside, -jnp.sum(jnp.log(safe)), jnp.inf)


def penalised(w, mu):
    return tracking(w) + mu * barrier(w)


@partial(jax.jit, static_argnames="max_halvings")
def descend(w, mu, max_halvings=40):
    f0, g = jax.value_and_grad(penalised)(w, mu)
    scale = jnp.minimum(w, CAP - w)
    d = -g * scale ** 2
    slope = g @ d

    def too_long(c):
        t, f, k = c
        return (k < max_halvings) & ~(f <= f0 + 1e-4 * t * slope)

    def halve(c):
        t, _, k = c
        t = 0.5 * t
        return t, penalised(w + t * d, mu), k + 1

    t, f, k = jax.lax.while_loop(too_long, halve, (jnp.float32(512.0), jnp.float32(jnp.inf), 0))
    ok = jnp.isfinite(f)
    return jnp.where(ok, w + t * d, w), jnp.where(ok, f, f0), k


def active_share(w, k=3):
    """mean weight of the positions above the cap warning level, NaN when there is none"""
    big = w > 0.95 * CAP
    return jnp.where(big.any(), jnp.sum(jnp.where(big, w, 0.0)) / jnp.sum(big), jnp.nan)


w = jnp.full(N, 1.0 / N)
print("outside the box the objective is", float(penalised(w.at[0].set(-0.01), 1.0)))
mu, best, halvings = 1e-2, jnp.inf, 0
for outer in range(7):
    for inner in range(80):
        w, f, k = descend(w, jnp.float32(mu))
        halvings += int(k)
    te = tracking(w)
    best = min(best, float(te))
    print(f"mu {mu:.0e} tracking {float(te):.5f} best {best:.5f} sum {float(w.sum()):.3f} "
          f"mean of capped positions {float(active_share(w)):.3f} halvings {halvings}")
    mu *= 0.2

top = np.argsort(-np.asarray(w))[:6]
print("largest positions", {int(i): round(float(w[i]), 3) for i in top})
print("true index       ", {int(i): round(float(W_TRUE[i]), 3) for i in np.argsort(-W_TRUE)[:6]})
corr = np.corrcoef(np.asarray(R @ w), np.asarray(INDEX))[0, 1]
print(f"correlation with the index {corr:.4f}")
assert np.isfinite(best) and corr > 0.97
