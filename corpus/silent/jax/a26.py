# nnx MLP with gradient accumulation over four micro-batches, breast-cancer data.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

MICRO, ACCUM, UPDATES = 32, 4, 120


class TabularNet(nnx.Module):
    def __init__(self, n_features, rngs):
        self.fc1 = nnx.Linear(n_features, 64, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.norm(self.fc1(x)))
        x = nnx.leaky_relu(self.fc2(x))
        return self.out(x)[:, 0]


@nnx.jit
def gradients(model, x, y):
    def bce(m):
        return optax.sigmoid_binary_cross_entropy(m(x), y).mean()

    return nnx.value_and_grad(bce)(model)


@nnx.jit
def apply(model, optimizer, grads):
    optimizer.update(model, jax.tree.map(lambda g: g / ACCUM, grads))


def main():
    data = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = StandardScaler().fit_transform(data.data)[order].astype("float32")
    y = data.target[order].astype("float32")
    model = TabularNet(x.shape[1], nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.sgd(3e-4), wrt=nnx.Param)
    rng = np.random.default_rng(1)
    for u in range(UPDATES):
        total, acc = 0.0, None
        for _ in range(ACCUM):
            i = rng.integers(0, 450, MICRO)
            loss, g = gradients(model, x[i], y[i])
            acc = g if acc is None else jax.tree.map(jnp.add, acc, g)
            total += float(loss) / ACCUM
        apply(model, optimizer, acc)
        if u % 15 == 0 or u == UPDATES - 1:
            print(f"update {u:3d} loss {total:.4f}")
    right = (model(jnp.asarray(x[450:])) > 0) == (y[450:] > 0.5)
    print("held-out accuracy", float(right.mean()))


main()
