import jax
import jax.numpy as jnp
import numpy as np
import optax

key = jax.random.PRNGKey(0)


@jax.custom_vjp
def fn(matrix, vector):
    return matrix @ vector


def fn_fwd(matrix, vector):
    return fn(matrix, vector), (matrix, vector)


def fn_bwd(res, g):
    matrix, vector = res
    grad_matrix = jnp.outer(g, vector)
    return grad_matrix, None


fn.defvjp(fn_fwd, fn_bwd)


def init(key, sizes):
    params = []
    for i, o in zip(sizes[:-1], sizes[1:]):
        key, sub = jax.random.split(key)
        params.append({"w": jax.random.normal(sub, (o, i)) * jnp.sqrt(2.0 / i), "b": jnp.zeros(o)})
    return params


def forward(params, x):
    for layer in params[:-1]:
        x = jax.nn.relu(fn(layer["w"], x) + layer["b"])
    return fn(params[-1]["w"], x) + params[-1]["b"]


batched = jax.vmap(forward, in_axes=(None, 0))


def loss_fn(params, x, y):
    logits = batched(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def data(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 40)).astype(np.float32)
    y = (np.sign(x[:, 0] * x[:, 1]) > 0).astype(np.int32) + 2 * (x[:, 2] + 0.5 * x[:, 3] ** 2 > 0.4).astype(np.int32)
    return jnp.array(x), jnp.array(y)


x_tr, y_tr = data(4000, 1)
x_va, y_va = data(1000, 2)
params = init(key, [40, 48, 32, 4])
opt = optax.adam(3e-3)
opt_state = opt.init(params)


@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(3)
for step in range(400):
    idx = rng.integers(0, 4000, 128)
    params, opt_state, loss = update(params, opt_state, x_tr[idx], y_tr[idx])
    if step % 80 == 0:
        print(f"step {step} loss {loss:.4f}")

print("FINAL", float(loss_fn(params, x_va, y_va)))
