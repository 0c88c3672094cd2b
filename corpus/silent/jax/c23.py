import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_breast_cancer


class DeepMLP(nnx.Module):
    def __init__(self, d_in, width, depth, rngs: nnx.Rngs):
        init = nnx.initializers.normal(stddev=0.02)
        self.inp = nnx.Linear(d_in, width, rngs=rngs, kernel_init=init)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs, kernel_init=init) for _ in range(depth)])
        self.out = nnx.Linear(width, 1, rngs=rngs, kernel_init=init)

    def __call__(self, x):
        x = nnx.relu(self.inp(x))
        for layer in self.blocks:
            x = nnx.relu(layer(x))
        return self.out(x)[:, 0]


def loss_fn(model, x, y):
    return optax.sigmoid_binary_cross_entropy(model(x), y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


def main():
    data = load_breast_cancer()
    x = ((data.data - data.data.mean(0)) / data.data.std(0)).astype(np.float32)
    y = data.target.astype(np.float32)
    rng = np.random.default_rng(0)
    perm = rng.permutation(len(x))
    x, y = x[perm], y[perm]
    model = DeepMLP(30, 48, 10, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.02, momentum=0.9), wrt=nnx.Param)
    for step in range(150):
        i = rng.integers(0, 450, 64)
        loss = train_step(model, optimizer, jnp.asarray(x[i]), jnp.asarray(y[i]))
        if step % 25 == 0 or step == 149:
            print(f"step {step:3d}: loss = {float(loss):.4f}")
    acc = np.mean((np.asarray(model(jnp.asarray(x[450:]))) > 0) == (y[450:] > 0.5))
    print(f"test accuracy = {acc:.3f}")


main()
