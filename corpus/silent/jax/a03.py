import functools
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split

CLASSES = 3


def get_data():
    x, y = load_wine(return_X_y=True)
    xtr, xte, ytr, yte = train_test_split(x, y, test_size=0.25, random_state=0, stratify=y)
    return xtr.astype("float32"), xte.astype("float32"), ytr, yte


def make_params(rng, widths):
    init = jax.nn.initializers.glorot_uniform()
    params = {}
    for n, (i, o) in enumerate(zip(widths, widths[1:])):
        rng, sub = jax.random.split(rng)
        params[f"layer{n}"] = dict(kernel=init(sub, (i, o)), bias=jnp.zeros((o,)))
    return params


def net(params, x):
    last = len(params) - 1
    for n in range(len(params)):
        p = params[f"layer{n}"]
        x = x @ p["kernel"] + p["bias"]
        if n != last:
            x = jnp.tanh(x)
    return x


def objective(params, x, y):
    logp = jax.nn.log_softmax(net(params, x))
    return -jnp.mean(jnp.sum(jax.nn.one_hot(y, CLASSES) * logp, axis=1))


@functools.partial(jax.jit, static_argnums=0)
def update(tx, params, state, x, y):
    value, grads = jax.value_and_grad(objective)(params, x, y)
    upd, state = tx.update(grads, state, params)
    return optax.apply_updates(params, upd), state, value


if __name__ == "__main__":
    xtr, xte, ytr, yte = get_data()
    params = make_params(jax.random.PRNGKey(7), (xtr.shape[1], 32, 32, CLASSES))
    tx = optax.adam(2e-3)
    state = tx.init(params)
    for it in range(200):
        params, state, value = update(tx, params, state, xtr, ytr)
        if it % 20 == 0:
            print("iter", it, "nll", round(float(value), 4))
    acc = (net(params, xte).argmax(1) == yte).mean()
    print("final nll", round(float(value), 4), "held-out accuracy", round(float(acc), 3))
