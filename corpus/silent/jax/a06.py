import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class TanhCell(nnx.Module):
    def __init__(self, n_in, n_hidden, *, rngs):
        self.wx = nnx.Variable(0.1 * jax.random.normal(rngs.params(), (n_in, n_hidden)))
        self.wh = nnx.Variable(0.1 * jax.random.normal(rngs.params(), (n_hidden, n_hidden)))
        self.b = nnx.Variable(jnp.zeros((n_hidden,)))

    def __call__(self, h, x):
        return jnp.tanh(x @ self.wx[...] + h @ self.wh[...] + self.b[...])


class SequenceModel(nnx.Module):
    def __init__(self, n_in, n_hidden, n_out, *, rngs):
        self.n_hidden = n_hidden
        self.cell = TanhCell(n_in, n_hidden, rngs=rngs)
        self.readout = nnx.Linear(n_hidden, n_out, rngs=rngs)

    def __call__(self, seq):
        h = jnp.zeros((seq.shape[0], self.n_hidden))
        for t in range(seq.shape[1]):
            h = self.cell(h, seq[:, t])
        return self.readout(h)


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main():
    digits = load_digits()
    x = jnp.asarray(digits.images / 16.0, jnp.float32)
    y = jnp.asarray(digits.target)
    model = SequenceModel(8, 32, 10, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(5e-3), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for i in range(250):
        ix = rng.integers(0, 1500, 64)
        loss = train_step(model, optimizer, x[ix], y[ix])
        if (i + 1) % 25 == 0:
            print("step", i + 1, "loss", f"{float(loss):.4f}")
    acc = (model(x[1500:]).argmax(-1) == y[1500:]).mean()
    print("accuracy on the last digits:", f"{float(acc):.3f}")


main()
