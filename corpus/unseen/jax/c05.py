# normalized gradient descent in half precision, iris versus the rest, small net
import jax, jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_iris

half = jnp.float16
data = load_iris()
x = (data.data - data.data.mean(0)) / data.data.std(0)
x = jnp.asarray(x, half)
y = jnp.asarray(data.target == 0, half)
perm = np.random.RandomState(0).permutation(150)
train_i, test_i = perm[:120], perm[120:]


def dense(key, n, m):
    return {"w": (jax.random.normal(key, (n, m)) / np.sqrt(n)).astype(half), "b": jnp.zeros((m,), half)}


def forward(p, x):
    h = jnp.tanh(x @ p["l1"]["w"] + p["l1"]["b"])
    h = jnp.tanh(h @ p["l2"]["w"] + p["l2"]["b"])
    return (h @ p["out"]["w"] + p["out"]["b"])[:, 0]


def bce(p, x, y):
    z = forward(p, x)
    l = jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z)))
    return l.mean()


class NormalizedSGD:
    """every tensor takes a step of length lr along its own gradient"""

    def __init__(self, lr=0.25, decay=0.985, momentum=0.5):
        self.lr, self.decay, self.momentum = lr, decay, momentum
        self.buf = None

    def direction(self, g):
        norm = jnp.sqrt(jnp.sum(jnp.square(g)))
        return g / norm

    def step(self, params, grads):
        d = jax.tree.map(self.direction, grads)
        if self.buf is None:
            self.buf = d
        else:
            self.buf = jax.tree.map(lambda b, u: self.momentum * b + u, self.buf, d)
        params = jax.tree.map(lambda p, b: p - half(self.lr) * b, params, self.buf)
        self.lr *= self.decay
        return params


keys = jax.random.split(jax.random.PRNGKey(42), 3)
params = {"l1": dense(keys[0], 4, 8), "l2": dense(keys[1], 8, 8), "out": dense(keys[2], 8, 1)}
opt = NormalizedSGD()
grad_fn = jax.jit(jax.value_and_grad(bce))

history = []
for step in range(60):
    sel = train_i[(step * 40) % 120:(step * 40) % 120 + 40]
    loss, grads = grad_fn(params, x[sel], y[sel])
    params = opt.step(params, grads)
    history.append(float(loss))
    if step % 5 == 0:
        acc = float(((forward(params, x[test_i]) > 0) == (y[test_i] > 0.5)).mean())
        print(f"{step:3d} | loss {history[-1]:.5f} | lr {opt.lr:.3f} | acc {acc:.3f}")
    if np.isnan(history[-1]):
        print("nan at step", step, "last good losses:", [round(h, 5) for h in history[-4:-1]])
        raise SystemExit(1)
print("final loss", history[-1])
