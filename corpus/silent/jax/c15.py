import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from sklearn.datasets import load_digits


class CNN(eqx.Module):
    conv1: eqx.nn.Conv2d
    conv2: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear

    def __init__(self, key):
        k = jax.random.split(key, 4)
        self.conv1 = eqx.nn.Conv2d(1, 8, 3, padding=1, key=k[0])
        self.conv2 = eqx.nn.Conv2d(8, 16, 3, padding=1, key=k[1])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.fc1 = eqx.nn.Linear(64, 32, key=k[2])
        self.fc2 = eqx.nn.Linear(32, 10, key=k[3])

    def __call__(self, x: Float[Array, "1 8 8"]) -> Float[Array, "10"]:
        x = self.pool(jax.nn.relu(self.conv1(x)))
        x = self.pool(jax.nn.relu(self.conv2(x)))
        x = jax.nn.relu(self.fc1(jnp.ravel(x)))
        return jax.nn.softmax(self.fc2(x))


def cross_entropy(model: CNN, x: Float[Array, "b 1 8 8"], y: Int[Array, "b"]):
    out = jax.vmap(model)(x)
    return jnp.mean(optax.softmax_cross_entropy(out, jax.nn.one_hot(y, 10)))


optim = optax.sgd(0.1, momentum=0.8)


@eqx.filter_jit
def make_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(cross_entropy)(model, x, y)
    updates, opt_state = optim.update(grads, opt_state, model)
    return eqx.apply_updates(model, updates), opt_state, loss


def evaluate(model, x, y):
    pred = jnp.argmax(jax.vmap(model)(x), axis=1)
    return jnp.mean(pred == y)


def main(steps=200, batch=64, seed=5678):
    digits = load_digits()
    images = ((digits.images - 8) / 8).astype(np.float32)[:, None]
    labels = digits.target
    rng = np.random.default_rng(seed)
    perm = rng.permutation(len(images))
    images, labels = images[perm], labels[perm]
    model = CNN(jax.random.PRNGKey(seed))
    opt_state = optim.init(eqx.filter(model, eqx.is_array))
    for step in range(steps):
        i = rng.integers(0, 1400, batch)
        model, opt_state, loss = make_step(model, opt_state, images[i], labels[i])
        if step % 40 == 0 or step == steps - 1:
            acc = evaluate(model, images[1400:], labels[1400:])
            print(f"{step=}, train_loss={loss.item():.4f}, test_accuracy={acc.item():.3f}")


main()
