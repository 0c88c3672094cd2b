"""Scalar xLSTM cell on the adding problem, with a growing sequence length."""
import jax
import jax.numpy as jnp
import optax
from jax import lax

H = 16


def init_params(key):
    kx, kh, ko = jax.random.split(key, 3)
    bias = jnp.zeros((4, H)).at[1].set(1.0)      # forget bias of one
    return dict(
        wx=0.3 * jax.random.normal(kx, (2, 4 * H)),
        wh=0.1 * jax.random.normal(kh, (H, 4 * H)),
        b=bias.reshape(-1),
        wo=0.3 * jax.random.normal(ko, (H, 1)),
        bo=jnp.zeros(1),
    )


def cell(p, carry, x):
    h, c, n = carry
    pre = x @ p["wx"] + h @ p["wh"] + p["b"]
    i_pre, f_pre, z_pre, o_pre = jnp.split(pre, 4, axis=-1)
    i = jnp.exp(i_pre)
    f = jnp.exp(f_pre)
    c = f * c + i * jnp.tanh(z_pre)
    n = f * n + i
    h = jax.nn.sigmoid(o_pre) * (c / n)
    return (h, c, n), None


def predict(p, xs):
    zeros = jnp.zeros((xs.shape[0], H))
    (h, _, _), _ = lax.scan(lambda s, x: cell(p, s, x), (zeros,) * 3,
                            jnp.swapaxes(xs, 0, 1))
    return (h @ p["wo"] + p["bo"])[:, 0]


def make_batch(key, length, n=32):
    k1, k2 = jax.random.split(key)
    vals = jax.random.uniform(k1, (n, length))
    marks = (jax.random.uniform(k2, (n, length)) < 2.0 / length).astype(float)
    return jnp.stack([vals, marks], -1), (vals * marks).sum(1)


def loss_fn(p, xs, target):
    return jnp.mean(optax.huber_loss(predict(p, xs), target))


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@jax.jit
def update(p, s, xs, target):
    loss, g = jax.value_and_grad(loss_fn)(p, xs, target)
    u, s = tx.update(g, s)
    return optax.apply_updates(p, u), s, loss


key = jax.random.PRNGKey(11)
params = init_params(key)
state = tx.init(params)
for length in (10, 30, 60, 120):
    for _ in range(30):
        key, sub = jax.random.split(key)
        params, state, loss = update(params, state, *make_batch(sub, length))
    print(f"length {length:4d}  loss {float(loss):.4f}")
