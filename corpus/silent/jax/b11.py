import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

DTYPE = jnp.bfloat16
LR = 2e-5


class Net(eqx.Module):
    inp: eqx.nn.Linear
    mid: list
    out: eqx.nn.Linear

    def __init__(self, key):
        ks = jax.random.split(key, 4)
        self.inp = eqx.nn.Linear(64, 512, key=ks[0])
        self.mid = [eqx.nn.Linear(512, 512, key=k) for k in ks[1:3]]
        self.out = eqx.nn.Linear(512, 10, key=ks[3])

    def __call__(self, x):
        x = jax.nn.gelu(self.inp(x))
        for layer in self.mid:
            x = jax.nn.gelu(layer(x))
        return self.out(x)


def to_dtype(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, tree)


def batches(x, y, size, seed):
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(x))
        for i in range(0, len(order) - size + 1, size):
            yield x[order[i:i + size]], y[order[i:i + size]]


def objective(model, x, y):
    logits = jax.vmap(model)(x.astype(DTYPE)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


x, y = load_digits(return_X_y=True)
x = ((x - x.mean()) / x.std()).astype(np.float32)
x_train, y_train, x_test, y_test = x[:1400], y[:1400], x[1400:], y[1400:]

model = to_dtype(Net(jax.random.key(8)), DTYPE)
optimizer = optax.adam(LR)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def train_step(model, opt_state, xb, yb):
    loss, grads = eqx.filter_value_and_grad(objective)(model, xb, yb)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


stream = batches(x_train, y_train, 100, seed=0)
for i in range(250):
    xb, yb = next(stream)
    model, opt_state, loss = train_step(model, opt_state, xb, yb)
    if (i + 1) % 25 == 0:
        print(f"{i + 1:4d} loss {loss:.4f}")

pred = jax.vmap(model)(jnp.asarray(x_test, DTYPE)).argmax(-1)
print("test accuracy", float((pred == y_test).mean()), "test loss", float(objective(model, x_test, y_test)))
