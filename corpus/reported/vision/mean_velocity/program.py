import jax
import jax.numpy as jnp
import numpy as np
import optax

P_NORM, C_NORM, BATCH, STEPS = 1.0, 1e-3, 256, 400


def init_mlp(key, sizes):
    ks = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (i, o)) / jnp.sqrt(i), jnp.zeros(o)) for k, i, o in zip(ks, sizes[:-1], sizes[1:])]


def u_net(params, z, r, t):
    feats = [z, r, t, t - r] + [f(w * np.pi * s) for s in (t, t - r) for w in (1, 2) for f in (jnp.sin, jnp.cos)]
    h = jnp.concatenate(feats, -1)
    for w, b in params[:-1]:
        h = jax.nn.silu(h @ w + b)
    w, b = params[-1]
    return h @ w + b


def sample_data(rng, n):
    k = rng.integers(0, 3, n)
    centre = np.array([[2.5, 1.2], [2.5, -1.2], [0.8, 0.0]])[k]
    return (centre + 0.2 * rng.normal(size=(n, 2))).astype(np.float32)


def loss_fn(params, x, e, r, t):
    z = (1 - t) * x + t * e
    v = e - x
    u, dudt = jax.jvp(lambda zz, rr, tt: u_net(params, zz, rr, tt), (z, r, t), (v, jnp.zeros_like(r), jnp.ones_like(t)))
    u_tgt = jax.lax.stop_gradient(v - (t - r) * dudt)
    sq = jnp.sum((u - u_tgt) ** 2, -1)
    weight = jax.lax.stop_gradient(1.0 / (sq + C_NORM) ** P_NORM)
    return jnp.mean(weight * sq), jnp.mean(sq)


optimizer = optax.adam(optax.cosine_decay_schedule(4e-3, STEPS))


@jax.jit
def train_step(params, opt_state, x, e, r, t):
    (loss, ref), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, x, e, r, t)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss, ref


def energy_distance(a, b):
    d = lambda p, q: np.sqrt(((p[:, None] - q[None]) ** 2).sum(-1) + 1e-12).mean()
    return 2 * d(a, b) - d(a, a) - d(b, b)


rng = np.random.default_rng(0)
params = init_mlp(jax.random.PRNGKey(0), [13, 96, 96, 96, 2])
opt_state = optimizer.init(params)
ref_data = sample_data(np.random.default_rng(7), 800)
noise = np.random.default_rng(8).normal(size=(800, 2)).astype(np.float32)
one_step = lambda p: np.asarray(noise - u_net(p, jnp.asarray(noise), jnp.zeros((800, 1)), jnp.ones((800, 1))))
print("untrained", energy_distance(one_step(params), ref_data))
for step in range(STEPS):
    x, e = sample_data(rng, BATCH), rng.normal(size=(BATCH, 2)).astype(np.float32)
    ts = 1 / (1 + np.exp(-rng.normal(-0.2, 1.0, (BATCH, 2))))
    r, t = ts.min(1, keepdims=True), ts.max(1, keepdims=True)
    r = np.where(rng.uniform(size=(BATCH, 1)) < 0.6, t, r)
    params, opt_state, loss, ref = train_step(params, opt_state, x, e, r.astype(np.float32), t.astype(np.float32))
    if step % 50 == 0:
        print(f"step {step:3d} loss {loss:.4f}")
print("FINAL", float(energy_distance(one_step(params), ref_data)))
