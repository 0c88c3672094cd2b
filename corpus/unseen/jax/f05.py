"""Digits with a "keep the norm" Adam: every matrix stays on its sphere, only the direction is learned."""
import jax
import jax.numpy as jnp
import numpy as np
from typing import NamedTuple
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class NormAdamState(NamedTuple):
    step: int
    m: dict
    v: dict


class NormAdam:
    def __init__(self, lr=2e-3, b1=0.9, b2=0.99, eps=1e-8, warmup=10):
        self.lr, self.b1, self.b2, self.eps, self.warmup = lr, b1, b2, eps, warmup

    def init(self, params):
        z = jax.tree.map(jnp.zeros_like, params)
        return NormAdamState(0, z, jax.tree.map(jnp.zeros_like, params))

    def _direction(self, m, v, t):
        return (m / (1 - self.b1 ** t)) / (jnp.sqrt(v / (1 - self.b2 ** t)) + self.eps)

    def update(self, grads, state, params):
        t = state.step + 1
        lr = self.lr * min(1.0, t / self.warmup)
        m = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state.m, grads)
        v = jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g * g, state.v, grads)

        def one(p, m_, v_):
            d = self._direction(m_, v_, t)
            if p.ndim < 2:
                return p - lr * d
            size = jnp.linalg.norm(p)
            cand = p - 20 * lr * size * d / (jnp.linalg.norm(d) + 1e-12)
            return cand * (size / jnp.linalg.norm(cand))

        return jax.tree.map(one, params, m, v), NormAdamState(t, m, v)


def dense(key, n_in, n_out, zero=False):
    w = jnp.zeros((n_in, n_out)) if zero else jax.random.normal(key, (n_in, n_out)) / np.sqrt(n_in)
    return {"w": w, "b": jnp.zeros(n_out)}


def build(key, width=64):
    ks = jax.random.split(key, 4)
    return {
        "embed": dense(ks[0], 64, width),
        "up": dense(ks[1], width, 2 * width),
        "down": dense(ks[2], 2 * width, width, zero=True),
        "head": dense(ks[3], width, 10),
    }


def lin(p, x):
    return x @ p["w"] + p["b"]


def forward(p, x):
    h = jnp.tanh(lin(p["embed"], x))
    h = h + lin(p["down"], jax.nn.gelu(lin(p["up"], h)))
    return lin(p["head"], h)


def loss_fn(p, x, y):
    logp = jax.nn.log_softmax(forward(p, x))
    return -jnp.take_along_axis(logp, y[:, None], 1).mean()


X, y = load_digits(return_X_y=True)
X = (X / 8.0 - 1.0).astype(np.float32)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0)
params = build(jax.random.PRNGKey(1))
opt = NormAdam()
state = opt.init(params)
value_and_grad = jax.jit(jax.value_and_grad(loss_fn))
accuracy = jax.jit(lambda p, x, y: (forward(p, x).argmax(-1) == y).mean())

rng = np.random.default_rng(0)
for step in range(24):
    idx = rng.choice(len(Xtr), 128, replace=False)
    loss, grads = value_and_grad(params, Xtr[idx], ytr[idx])
    params, state = opt.update(grads, state, params)
    if step % 5 == 0:
        print(f"step {step:3d} loss {float(loss):.4f} test acc {float(accuracy(params, Xte, yte)):.3f}")
print("final accuracy", float(accuracy(params, Xte, yte)))
