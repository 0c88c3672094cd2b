"""MAML on sinusoids: the inner loop adapts with Adam, the outer loop with SGD + momentum."""
from functools import partial
import jax
import jax.numpy as jnp
import optax

INNER_STEPS = 3


def init_net(key, widths=(1, 40, 40, 1)):
    params = []
    for i, o in zip(widths[:-1], widths[1:]):
        key, k = jax.random.split(key)
        params.append({"W": jax.random.normal(k, (i, o)) * jnp.sqrt(2.0 / i), "b": jnp.zeros(o)})
    return params


def net(params, x):
    for p in params[:-1]:
        x = jax.nn.relu(x @ p["W"] + p["b"])
    return x @ params[-1]["W"] + params[-1]["b"]


def mse(params, x, y):
    return jnp.mean((net(params, x) - y) ** 2)


inner_tx = optax.adam(1e-2)
outer_tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9))


def adapt(params, x, y):
    def body(carry, _):
        p, s = carry
        g = jax.grad(mse)(p, x, y)
        u, s = inner_tx.update(g, s, p)
        return (optax.apply_updates(p, u), s), None

    (params, _), _ = jax.lax.scan(body, (params, inner_tx.init(params)), None, length=INNER_STEPS)
    return params


def task_loss(params, task):
    xs, ys, xq, yq = task
    return mse(adapt(params, xs, ys), xq, yq)


@partial(jax.jit, static_argnums=1)
def sample_tasks(key, n):
    ka, kp, kx = jax.random.split(key, 3)
    amp = jax.random.uniform(ka, (n, 1, 1), minval=0.5, maxval=4.0)
    ph = jax.random.uniform(kp, (n, 1, 1), maxval=jnp.pi)
    x = jax.random.uniform(kx, (n, 20, 1), minval=-4.0, maxval=4.0)
    y = amp * jnp.sin(x + ph)
    return x[:, :10], y[:, :10], x[:, 10:], y[:, 10:]


@jax.jit
def meta_step(params, state, tasks):
    loss, g = jax.value_and_grad(lambda p: jnp.mean(jax.vmap(task_loss, (None, 0))(p, tasks)))(params)
    u, state = outer_tx.update(g, state, params)
    return optax.apply_updates(params, u), state, loss


key = jax.random.PRNGKey(3)
key, k = jax.random.split(key)
params = init_net(k)
state = outer_tx.init(params)
for it in range(60):
    key, k = jax.random.split(key)
    params, state, loss = meta_step(params, state, sample_tasks(k, 8))
    if it % 5 == 0:
        print("meta iter", it, "query mse", float(loss))
