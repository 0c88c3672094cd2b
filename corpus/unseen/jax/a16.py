"""DeepSurv-like Cox model trained with mini-batches."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

rng = np.random.default_rng(8)
N, P = 600, 8
X = rng.standard_normal((N, P)).astype(np.float32)
risk = 0.8 * X[:, 0] - 0.6 * X[:, 1] * X[:, 2]
event_time = rng.exponential(np.exp(-risk)) * 12
censor_time = rng.exponential(2.0, N)
time = np.minimum(event_time, censor_time).astype(np.float32)
event = (event_time <= censor_time).astype(np.float32)
print("event rate", event.mean())


def init(key):
    k1, k2 = jax.random.split(key)
    return {"w1": jax.random.normal(k1, (P, 32)) * np.sqrt(1 / P), "b1": jnp.zeros(32),
            "w2": jax.random.normal(k2, (32,)) * 0.1}


def log_hazard(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def neg_partial_likelihood(params, x, t, e):
    order = jnp.argsort(-t)
    lh = log_hazard(params, x)[order]
    e = e[order]
    log_risk = jax.lax.cumlogsumexp(lh)
    return -jnp.sum((lh - log_risk) * e) / jnp.sum(e)


def concordance(params):
    lh = np.asarray(log_hazard(params, X))
    good = tot = 0
    for i in np.where(event > 0)[0]:
        later = time > time[i]
        good += np.sum(lh[i] > lh[later])
        tot += later.sum()
    return good / tot


tx = optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(optax.exponential_decay(0.1, 50, 0.8), momentum=0.9))
params = init(jax.random.PRNGKey(0))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, t, e):
    loss, grads = jax.value_and_grad(neg_partial_likelihood)(params, x, t, e)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


it = 0
for epoch in range(8):
    perm = rng.permutation(N)
    for b in np.split(perm, N // 24):
        params, opt_state, loss = step(params, opt_state, X[b], time[b], event[b])
        it += 1
    print(f"epoch {epoch} it {it} loss {float(loss):.4f} c-index {concordance(params):.3f}")
