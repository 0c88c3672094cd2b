import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, DEPTH, D_IN, D_OUT = 256, 3, 24, 10
LR = 4e-5
DTYPE = jnp.bfloat16


def init(key):
    sizes = [D_IN] + [WIDTH] * DEPTH + [D_OUT]
    layers = []
    for k, (m, n) in zip(jax.random.split(key, len(sizes)), zip(sizes[:-1], sizes[1:])):
        layers.append({"w": jax.random.normal(k, (m, n)) * jnp.sqrt(2.0 / m), "b": jnp.zeros((n,))})
    return layers


def forward(params, x):
    for layer in params[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y, dtype):
    params = jax.tree_util.tree_map(lambda p: p.astype(dtype), params)
    logits = forward(params, x.astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make_domain(seed, n, mix):
    r = np.random.default_rng(seed)
    base = np.random.default_rng(123)
    w1, w2 = base.normal(size=(D_IN, D_OUT)), base.normal(size=(D_IN, D_OUT))
    x = r.normal(size=(n, D_IN)).astype(np.float32)
    y = (x @ ((1 - mix) * w1 + mix * w2)).argmax(-1)
    return jnp.asarray(x), jnp.asarray(y)


@functools.partial(jax.jit, static_argnums=(4, 5))
def update(params, opt_state, x, y, tx, dtype):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, dtype)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(0)
params = init(jax.random.PRNGKey(0))

# base model, full precision
x0, y0 = make_domain(1, 10000, 0.0)
tx = optax.adam(1e-3)
opt_state = tx.init(params)
for step in range(100):
    i = rng.integers(0, len(y0), 256)
    params, opt_state, loss = update(params, opt_state, x0[i], y0[i], tx, jnp.float32)
print("base loss", float(loss))

# fine-tune on the new domain
x1, y1 = make_domain(2, 10000, 0.6)
xv, yv = make_domain(3, 4000, 0.6)
tx = optax.adam(LR)
opt_state = tx.init(params)
for step in range(300):
    i = rng.integers(0, len(y1), 256)
    params, opt_state, loss = update(params, opt_state, x1[i], y1[i], tx, DTYPE)
    if step % 50 == 0:
        print(f"step {step} loss {float(loss):.4f}")

print("FINAL", float(loss_fn(params, xv, yv, DTYPE)))
