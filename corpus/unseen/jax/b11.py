import jax
import jax.numpy as jnp
import numpy as np
import optax

# mixed precision: fp32 weights, fp16 compute, static loss scale
COMPUTE = jnp.float16
LOSS_SCALE = jnp.asarray(2.0**16, dtype=COMPUTE)


def to_half(tree):
    return jax.tree_util.tree_map(lambda x: x.astype(COMPUTE), tree)


def two_moons(n, seed):
    r = np.random.default_rng(seed)
    th = r.uniform(0, np.pi, n)
    lab = r.integers(0, 2, n)
    x = np.stack([np.cos(th), np.sin(th)], 1)
    x[lab == 1] = np.stack([1 - np.cos(th[lab == 1]), 0.5 - np.sin(th[lab == 1])], 1)
    return (x + 0.1 * r.standard_normal(x.shape)).astype(np.float32), lab


def init(seed):
    r = np.random.default_rng(seed)
    dims = [2, 32, 32, 2]
    return [
        {"w": jnp.asarray(r.standard_normal((a, b)) / np.sqrt(a), jnp.float32),
         "b": jnp.zeros(b, jnp.float32)}
        for a, b in zip(dims[:-1], dims[1:])
    ]


def apply(params, x):
    for lyr in params[:-1]:
        x = jnp.tanh(x @ lyr["w"] + lyr["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y):
    logits = apply(to_half(params), x.astype(COMPUTE))
    logp = jax.nn.log_softmax(logits)
    loss = -jnp.mean(logp[jnp.arange(y.shape[0]), y])
    return loss * LOSS_SCALE, loss


opt = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(1e-2))


@jax.jit
def train_step(params, opt_state, x, y):
    grads, loss = jax.grad(loss_fn, has_aux=True)(params, x, y)
    grads = jax.tree_util.tree_map(lambda g: g / LOSS_SCALE.astype(jnp.float32), grads)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


x, y = two_moons(512, 0)
params = init(1)
opt_state = opt.init(params)
for i in range(100):
    params, opt_state, loss = train_step(params, opt_state, x, y)
    if i % 10 == 0:
        print("step", i, "loss", loss)
pred = apply(params, x).argmax(1)
print("train accuracy", float((pred == y).mean()))
