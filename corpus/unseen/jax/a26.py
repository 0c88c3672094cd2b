import functools
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

digits = load_digits()
x_tr, x_te, y_tr, y_te = train_test_split(
    digits.data.astype(np.float32), digits.target, test_size=0.25, random_state=0)


def fit_scaler(x):
    return x.mean(axis=0), x.std(axis=0)


def scale(x, stats):
    mu, sd = stats
    return (x - mu) / sd


stats = fit_scaler(x_tr)
x_tr, x_te = scale(x_tr, stats), scale(x_te, stats)


def init(rng, sizes):
    params = []
    for i, o in zip(sizes[:-1], sizes[1:]):
        rng, k = jax.random.split(rng)
        params.append((jax.random.normal(k, (i, o)) * np.sqrt(2 / i), jnp.zeros(o)))
    return params


def logits_fn(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def loss_fn(params, x, y, smoothing=0.05):
    logp = jax.nn.log_softmax(logits_fn(params, x))
    target = jax.nn.one_hot(y, 10) * (1 - smoothing) + smoothing / 10
    return -jnp.mean(jnp.sum(target * logp, axis=-1))


@functools.partial(jax.jit, static_argnames=("lr", "mu"))
def nesterov(params, vel, x, y, lr=0.02, mu=0.9):
    look = jax.tree.map(lambda p, v: p + mu * v, params, vel)
    loss, g = jax.value_and_grad(loss_fn)(look, x, y)
    vel = jax.tree.map(lambda v, d: mu * v - lr * d, vel, g)
    return jax.tree.map(jnp.add, params, vel), vel, loss


params = init(jax.random.key(0), [64, 64, 10])
vel = jax.tree.map(jnp.zeros_like, params)
order = np.random.RandomState(0)
for epoch in range(5):
    idx = order.permutation(len(x_tr))
    losses = []
    for s in range(0, len(idx) - 64, 64):
        b = idx[s:s + 64]
        params, vel, loss = nesterov(params, vel, x_tr[b], y_tr[b])
        losses.append(float(loss))
    acc = (np.asarray(logits_fn(params, x_te)).argmax(1) == y_te).mean()
    print(f"epoch {epoch} train loss {np.mean(losses):.4f} test acc {acc:.3f}")
