import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


@jax.custom_vjp
def binarize(w):
    return jnp.where(w >= 0, 1.0, -1.0)


def _fwd(w):
    return binarize(w), w


def _bwd(w, g):
    return (g * (jnp.abs(w) <= 1.0),)


binarize.defvjp(_fwd, _bwd)


class BinaryLinear(nnx.Module):
    def __init__(self, n_in, n_out, rngs):
        self.kernel = nnx.Param(jax.random.uniform(rngs.params(), (n_in, n_out), minval=-0.1, maxval=0.1))
        self.norm = nnx.LayerNorm(n_out, rngs=rngs)
        self.n_in = n_in

    def __call__(self, x):
        w = binarize(self.kernel[...])
        return self.norm(x @ w / jnp.sqrt(self.n_in))


class BinaryNet(nnx.Module):
    def __init__(self, rngs):
        self.l1 = BinaryLinear(64, 256, rngs)
        self.l2 = BinaryLinear(256, 256, rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = binarize(self.l1(x))
        x = binarize(self.l2(x))
        return self.out(x)


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@nnx.jit
def micro_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]

    model = BinaryNet(nnx.Rngs(1))
    tx = optax.MultiSteps(optax.adam(3e-3), every_k_schedule=4)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for i in range(400):
        b = rng.choice(tr, 16, replace=False)
        loss = micro_step(model, optimizer, x[b], y[b])
        if i % 40 == 0:
            print(f"micro step {i:3d}  loss {float(loss):.4f}")
    acc = (model(jnp.asarray(x[te])).argmax(-1) == y[te]).mean()
    print("test accuracy", float(acc))


if __name__ == "__main__":
    main()
