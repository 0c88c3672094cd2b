"""Shampoo by hand on the digits: one left and one right preconditioner per weight matrix."""
import jax
import jax.numpy as jnp
import numpy as np
from typing import NamedTuple
from sklearn.datasets import load_digits


class FactorState(NamedTuple):
    left: jax.Array
    right: jax.Array
    left_root: jax.Array
    right_root: jax.Array


def inv_fourth_root(m):
    w, v = jnp.linalg.eigh(m)
    return (v * w ** -0.25) @ v.T


class Shampoo:
    def __init__(self, lr=0.3, eps=1e-6, refresh=4):
        self.lr, self.eps, self.refresh = lr, eps, refresh
        self.count = 0
        self._accumulate = jax.jit(lambda s, g: s._replace(left=s.left + g @ g.T, right=s.right + g.T @ g))
        self._roots = jax.jit(lambda s: s._replace(left_root=inv_fourth_root(s.left),
                                                   right_root=inv_fourth_root(s.right)))

    def init(self, params):
        def one(p):
            if p.ndim != 2:
                return jnp.zeros_like(p)
            m, n = p.shape
            return FactorState(self.eps * jnp.eye(m), self.eps * jnp.eye(n), jnp.eye(m), jnp.eye(n))
        return {k: one(p) for k, p in params.items()}

    def step(self, params, grads, state):
        new_p, new_s = {}, {}
        for k, g in grads.items():
            s = state[k]
            if isinstance(s, FactorState):
                s = self._accumulate(s, g)
                if self.count % self.refresh == 0:
                    s = self._roots(s)
                direction = s.left_root @ g @ s.right_root
            else:
                s = s + g ** 2
                direction = g / (jnp.sqrt(s) + 1e-8)
            new_p[k], new_s[k] = params[k] - self.lr * direction, s
        self.count += 1
        return new_p, new_s


def forward(p, x):
    h = jax.nn.relu(x @ p["w1"] + p["b1"])
    return h @ p["w2"] + p["b2"]


@jax.jit
def loss_and_grad(p, x, y):
    def f(q):
        lp = jax.nn.log_softmax(forward(q, x))
        return -jnp.mean(lp[jnp.arange(x.shape[0]), y])
    return jax.value_and_grad(f)(p)


digits = load_digits()
X, y = (digits.data / 16.0).astype(np.float32), digits.target
rng = np.random.RandomState(3)
perm = rng.permutation(len(X))
X, y = X[perm], y[perm]

k1, k2 = jax.random.split(jax.random.PRNGKey(0))
params = {"w1": 0.05 * jax.random.normal(k1, (64, 32)), "b1": jnp.zeros(32),
          "w2": 0.2 * jax.random.normal(k2, (32, 10)), "b2": jnp.zeros(10)}
opt = Shampoo(lr=0.1)
state = opt.init(params)
for it in range(60):
    idx = rng.randint(0, 1400, 96)
    loss, grads = loss_and_grad(params, X[idx], y[idx])
    params, state = opt.step(params, grads, state)
    if it % 4 == 0:
        acc = float((forward(params, X[1400:]).argmax(1) == y[1400:]).mean())
        print(f"it {it:2d} loss {float(loss):.4f} val acc {acc:.3f}")
