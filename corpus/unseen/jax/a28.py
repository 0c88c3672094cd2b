"""Log-Euclidean regression on SPD matrices: learn one reference matrix plus a per-subject slope."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

D = 4


def logm(C):
    w, V = jnp.linalg.eigh(C)
    return (V * jnp.log(w)) @ V.T


def expm_sym(S):
    w, V = np.linalg.eigh(S)
    return (V * np.exp(w)) @ V.T


def simulate(n, rng):
    base = rng.standard_normal((D, D)) * 0.4
    slope = rng.standard_normal((D, D)) * 0.3
    base, slope = (base + base.T) / 2, (slope + slope.T) / 2
    age = rng.uniform(-1, 1, n)
    mats = []
    for a in age:
        noise = rng.standard_normal((D, D)) * 0.05
        mats.append(expm_sym(base + a * slope + (noise + noise.T) / 2))
    return age.astype(np.float32), np.stack(mats).astype(np.float32)


def spd(chol):
    L = jnp.tril(chol)
    return L @ L.T


def loss_fn(params, age, mats):
    ref = logm(spd(params["ref_chol"]))
    slope = 0.5 * (params["slope"] + params["slope"].T)
    pred = ref + age[:, None, None] * slope
    target = jax.vmap(logm)(mats)
    return jnp.mean(jnp.sum((pred - target) ** 2, axis=(1, 2)))


rng = np.random.default_rng(0)
age, mats = simulate(80, rng)
params = {"ref_chol": jnp.eye(D), "slope": jnp.zeros((D, D))}
tx = optax.adabelief(2e-2)
opt_state = tx.init(params)
grad_fn = jax.jit(jax.value_and_grad(loss_fn))
ema = params
for it in range(100):
    loss, grads = grad_fn(params, age, mats)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    ema = jax.tree.map(lambda e, p: 0.95 * e + 0.05 * p, ema, params)
    if it % 10 == 0:
        print(f"iteration {it}: loss {loss:.4f}, ref trace {jnp.trace(spd(ema['ref_chol'])):.4f}")
