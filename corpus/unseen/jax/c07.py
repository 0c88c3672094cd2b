import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_diabetes


class ResBlock(nnx.Module):
    def __init__(self, dim, rngs):
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Regressor(nnx.Module):
    def __init__(self, din, dim, depth, rngs):
        self.inp = nnx.Linear(din, dim, rngs=rngs)
        self.blocks = nnx.List([ResBlock(dim, rngs) for _ in range(depth)])
        self.head = nnx.Linear(dim, 1, kernel_init=nnx.initializers.zeros_init(), rngs=rngs)

    def __call__(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)[:, 0]


def pearson(a, b):
    a = a - a.mean()
    b = b - b.mean()
    cov = (a * b).mean()
    return cov / (jnp.sqrt((a ** 2).mean()) * jnp.sqrt((b ** 2).mean()))


def loss_fn(model, x, y):
    pred = model(x)
    corr = pearson(pred, y)
    return (1.0 - corr) + 0.1 * jnp.mean(jnp.abs(pred - y)), corr


@nnx.jit
def train_step(model, optimizer, x, y):
    (loss, corr), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    return loss, corr


def main(epochs=5, bs=64, seed=0):
    X, y = load_diabetes(return_X_y=True)
    X = (X / X.std(0)).astype(np.float32)
    y = ((y - y.mean()) / y.std()).astype(np.float32)
    rs = np.random.RandomState(seed)
    p = rs.permutation(len(X))
    tr, va = p[:352], p[352:]
    model = Regressor(10, 24, 2, nnx.Rngs(seed))
    n_par = sum(v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print("parameters:", n_par)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3, weight_decay=1e-2), wrt=nnx.Param)
    for ep in range(epochs):
        rs.shuffle(tr)
        tot = []
        for i in range(0, len(tr) - bs + 1, bs):
            idx = tr[i:i + bs]
            loss, corr = train_step(model, optimizer, X[idx], y[idx])
            tot.append(float(loss))
        v = pearson(model(X[va]), y[va])
        print(f"epoch {ep}  train {np.mean(tot):.4f}  valid corr {float(v):.4f}")
        if np.isnan(tot).any():
            raise RuntimeError("training diverged (nan)")


if __name__ == "__main__":
    main()
