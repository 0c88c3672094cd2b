import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax

BETA, THRESH, T, SLOPE = 0.9, 1.0, 25, 10.0


@jax.custom_vjp
def spike(v):
    return (v > 0).astype(jnp.float32)


def spike_fwd(v):
    return spike(v), v


def spike_bwd(v, g):
    return (g / (1.0 + SLOPE * jnp.abs(v)) ** 2,)


spike.defvjp(spike_fwd, spike_bwd)


def lif(carry, current):
    mem, s = carry
    mem = BETA * mem + current - THRESH * jax.lax.stop_gradient(s)
    s = spike(mem - THRESH)
    return (mem, s), s


def network(params, x):
    def tick(carry, xt):
        c1, c2 = carry
        c1, s1 = lif(c1, xt @ params["w_in"])
        c2, s2 = lif(c2, s1 @ params["w_out"])
        return (c1, c2), (s1, s2)

    b = x.shape[1]
    z = lambda n: (jnp.zeros((b, n)), jnp.zeros((b, n)))
    _, (hidden, out) = jax.lax.scan(tick, (z(params["w_in"].shape[1]), z(params["w_out"].shape[1])), x)
    return out.sum(0), hidden.mean()


def objective(params, x, y):
    counts, rate = network(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(counts, y).mean() + 0.1 * rate, rate


def patterns(n, seed):
    rng = np.random.default_rng(seed)
    templates = np.random.default_rng(50).uniform(0, 0.35, (5, 1, 30)) * (
        np.random.default_rng(51).uniform(size=(5, T, 30)) < 0.5)
    y = rng.integers(0, 5, n)
    x = (rng.uniform(size=(n, T, 30)) < templates[y]).astype(np.float32)
    return jnp.asarray(x.transpose(1, 0, 2)), jnp.asarray(y)


@functools.partial(jax.jit, static_argnums=0)
def train_step(tx, params, state, x, y):
    (loss, rate), grads = jax.value_and_grad(objective, has_aux=True)(params, x, y)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state, loss, rate


x_tr, y_tr = patterns(2000, 0)
x_te, y_te = patterns(500, 1)
k1, k2 = jax.random.split(jax.random.PRNGKey(0))
params = {"w_in": jax.random.normal(k1, (30, 40)) * 0.4, "w_out": jax.random.normal(k2, (40, 5)) * 0.3}
tx = optax.adam(3e-3)
state = tx.init(params)
rng = np.random.default_rng(4)
for i in range(300):
    idx = rng.integers(0, 2000, 64)
    params, state, loss, rate = train_step(tx, params, state, x_tr[:, idx], y_tr[idx])
    if i % 50 == 0:
        print(f"iteration {i}: loss {loss:.4f}, hidden firing rate {rate:.3f}")

counts, _ = network(params, x_te)
print("FINAL", float((counts.argmax(-1) != y_te).mean()))
