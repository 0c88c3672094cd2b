"""1.58 bit weights, trained from scratch with fake quantization."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

QMIN, QMAX = -1.0, 1.0


@jax.custom_vjp
def ste_round(x):
    return jnp.round(x)


ste_round.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


def fake_quant(w):
    scale = jax.lax.stop_gradient(jnp.mean(jnp.abs(w)) + 1e-8)
    q = ste_round(w / scale)
    q = jnp.where((q >= QMIN) & (q <= QMAX), q, jax.lax.clamp(QMIN, q, QMAX))
    return q * scale


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def init(key, sizes):
    keys = jax.random.split(key, len(sizes))
    return {
        "quant": [jax.random.normal(k, (m, n)) / jnp.sqrt(m) for k, m, n in zip(keys, sizes[:-2], sizes[1:-1])],
        "out_w": jax.random.normal(keys[-1], (sizes[-2], sizes[-1])) * 0.05,
        "out_b": jnp.zeros((sizes[-1],)),
    }


def apply(params, x):
    for w in params["quant"]:
        x = jax.nn.silu(rms_norm(x) @ fake_quant(w))
    return rms_norm(x) @ params["out_w"] + params["out_b"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()


rng = np.random.default_rng(4)
D, C = 24, 8
proto = rng.normal(size=(C * 16, D))


def data(n):
    k = rng.integers(0, C * 16, n)
    x = proto[k] + 0.6 * rng.normal(size=(n, D))
    return jnp.asarray(x, dtype=jnp.float32), jnp.asarray(k % C)


x_train, y_train = data(12000)
x_val, y_val = data(3000)
params = init(jax.random.PRNGKey(0), [D, 96, 96, 96, C])
schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 20, 400)
opt = optax.adamw(schedule, weight_decay=0.0)
opt_state = opt.init(params)


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for step in range(400):
    idx = rng.integers(0, len(y_train), 256)
    params, opt_state, loss = train_step(params, opt_state, x_train[idx], y_train[idx])
    if step % 50 == 0:
        print(f"{step:4d} train {float(loss):.4f} val {float(loss_fn(params, x_val, y_val)):.4f}")

err = float((apply(params, x_val).argmax(-1) != y_val).mean())
print("val error", err)
print("FINAL", float(loss_fn(params, x_val, y_val)))
