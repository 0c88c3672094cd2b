import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_digits


class SmallConv(eqx.Module):
    convs: list
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    pool: eqx.nn.MaxPool2d

    def __init__(self, key):
        k = jr.split(key, 4)
        self.convs = [eqx.nn.Conv2d(1, 12, 3, padding=1, key=k[0]), eqx.nn.Conv2d(12, 24, 3, padding=1, key=k[1])]
        self.fc1 = eqx.nn.Linear(24 * 4, 64, key=k[2])
        self.fc2 = eqx.nn.Linear(64, 10, key=k[3])
        self.pool = eqx.nn.MaxPool2d(2, 2)

    def __call__(self, x):
        for conv in self.convs:
            x = self.pool(jax.nn.relu(conv(x)))
        x = jax.nn.relu(self.fc1(x.reshape(-1)))
        return self.fc2(x)


def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make_step(optimizer):
    @eqx.filter_jit
    def step(model, opt_state, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss
    return step


@eqx.filter_jit
def accuracy(model, x, y):
    return (jax.vmap(model)(x).argmax(-1) == y).mean()


def main(steps=240):
    digits = load_digits()
    x = ((digits.images - 4.9) / 6.0).astype(np.float32)[:, None]
    y = digits.target
    # change the rate by a factor of 10 after 90 steps and once more after 180
    lr = optax.piecewise_constant_schedule(0.05, {90: 10.0, 180: 0.1})
    optimizer = optax.sgd(lr, momentum=0.9)
    model = SmallConv(jr.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    step = make_step(optimizer)
    rng = np.random.default_rng(0)
    for i in range(steps):
        idx = rng.integers(0, 1400, 64)
        model, opt_state, loss = step(model, opt_state, x[idx], y[idx])
        if i % 15 == 0:
            print(f"step {i:3d} loss {loss:.4f}")
    print("test accuracy", float(accuracy(model, x[1400:], y[1400:])))


main()
