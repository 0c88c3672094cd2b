import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

INIT_STD = 0.02
LAYERS = [64] + [80] * 12 + [10]


def init_params(key, sizes):
    params = []
    for n_in, n_out in zip(sizes[:-1], sizes[1:]):
        key, sub = jax.random.split(key)
        params.append({
            "w": INIT_STD * jax.random.normal(sub, (n_in, n_out)),
            "b": jnp.zeros((n_out,)),
        })
    return params


def forward(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def cross_entropy(params, x, y):
    logp = jax.nn.log_softmax(forward(params, x))
    return -jnp.take_along_axis(logp, y[:, None], axis=1).mean()


optimizer = optax.sgd(optax.exponential_decay(0.1, 100, 0.8), momentum=0.9)


@jax.jit
def update(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(cross_entropy)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


def batches(x, y, size, epochs, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for i in range(0, len(x) - size + 1, size):
            sel = order[i:i + size]
            yield x[sel], y[sel]


x, y = load_digits(return_X_y=True)
x = ((x - x.mean()) / x.std()).astype(np.float32)
x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, random_state=2, stratify=y)

params = init_params(jax.random.PRNGKey(0), LAYERS)
opt_state = optimizer.init(params)
for it, (bx, by) in enumerate(batches(x_train, y_train, 64, epochs=15)):
    params, opt_state, loss = update(params, opt_state, bx, by)
    if it % 40 == 0:
        print(f"iter {it:3d}  loss {float(loss):.4f}")

acc = float((forward(params, x_test).argmax(1) == y_test).mean())
print(f"final loss {float(loss):.4f}  test acc {acc:.3f}")
