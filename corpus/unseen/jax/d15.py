"""MALA for reaction rates k1, k2 > 0 with k1 > k2 (A -> B -> C), the prior is -inf elsewhere."""
import jax
import jax.numpy as jnp
import numpy as np

TRUE = np.array([1.3, 0.4])
t = np.linspace(0.1, 3, 14).astype(np.float32)


def conc_b(k, t):
    k1, k2 = k
    return k1 / (k1 - k2) * (jnp.exp(-k2 * t) - jnp.exp(-k1 * t))


rng = np.random.RandomState(0)
obs = np.asarray(conc_b(TRUE, t)) + 0.2 * rng.randn(len(t))
obs = jnp.asarray(obs.astype(np.float32))


def log_post(k):
    inside = (k[1] > 0) & (k[0] > k[1])
    resid = (obs - conc_b(k, t)) / 0.2
    lp = -0.5 * jnp.sum(resid ** 2) + jnp.sum(jnp.log(k)) - jnp.sum(k)
    return jnp.where(inside, lp, -jnp.inf)


lp_and_grad = jax.jit(jax.value_and_grad(log_post))


def log_q(to, frm, g_frm, eps):
    mean = frm + 0.5 * eps ** 2 * g_frm
    return -0.5 * jnp.sum((to - mean) ** 2) / eps ** 2


@jax.jit
def mala(key, k, lp, g, eps):
    k1, k2 = jax.random.split(key)
    prop = k + 0.5 * eps ** 2 * g + eps * jax.random.normal(k1, k.shape)
    lp_new, g_new = jax.value_and_grad(log_post)(prop)
    log_ratio = lp_new - lp + log_q(k, prop, g_new, eps) - log_q(prop, k, g, eps)
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept = jnp.log(jax.random.uniform(k2, minval=1e-12)) < log_ratio
    keep = lambda a, b: jnp.where(accept, a, b)
    return keep(prop, k), keep(lp_new, lp), keep(g_new, g), accept, jnp.isfinite(lp_new)


key = jax.random.PRNGKey(6)
start_lp = -jnp.inf
while not np.isfinite(float(start_lp)):
    key, sub = jax.random.split(key)
    k = jax.random.uniform(sub, (2,), minval=-1.0, maxval=2.0)
    start_lp, g = lp_and_grad(k)
    print("start", np.asarray(k).round(3), "logp", float(start_lp))

lp, eps, kept, outside, n_acc = start_lp, 0.08, [], 0, 0
g = jnp.clip(g, -50, 50)
best_lp, best_k = -np.inf, None
for it in range(1200):
    key, sub = jax.random.split(key)
    k, lp, g, acc, inside = mala(sub, k, lp, g, eps)
    n_acc += int(acc)
    outside += int(not inside)
    if float(lp) > best_lp:
        best_lp, best_k = float(lp), np.asarray(k)
    if it < 400:
        eps = float(np.clip(eps * np.exp(0.05 * (float(acc) - 0.57)), 1e-3, 0.8))
    else:
        kept.append(np.asarray(k))
    if it % 200 == 0:
        print(f"it {it:4d} k {np.asarray(k).round(3)} logp {float(lp):9.2f} eps {eps:.4f} outside {outside}")
kept = np.array(kept)
print("posterior mean", kept.mean(0).round(3), "sd", kept.std(0).round(3), "map", best_k.round(3), "acc", n_acc / 1200)
assert np.isfinite(kept).all()
