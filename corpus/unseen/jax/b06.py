import jax
import jax.numpy as jnp
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler


class Adam:
    """Own Adam so that we can play with the moments."""

    def __init__(self, params, lr=1e-3, b1=0.9, b2=0.999, eps=1e-8):
        self.lr, self.b1, self.b2, self.eps = lr, b1, b2, eps
        self.m = jax.tree.map(jnp.zeros_like, params)
        self.v = jax.tree.map(jnp.zeros_like, params)

    def step(self, params, grads, t):
        b1, b2 = self.b1, self.b2
        self.m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, self.m, grads)
        self.v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, self.v, grads)
        m_hat = jax.tree.map(lambda m: m / (1 - b1**t), self.m)
        v_hat = jax.tree.map(lambda v: v / (1 - b2**t), self.v)
        return jax.tree.map(
            lambda p, m, v: p - self.lr * m / (jnp.sqrt(v) + self.eps), params, m_hat, v_hat
        )


def init_mlp(key, sizes):
    params = []
    for k, m, n in zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:]):
        params.append((jax.random.normal(k, (m, n)) * (2.0 / m) ** 0.5, jnp.zeros(n)))
    return params


def predict(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return (x @ w + b)[:, 0]


@jax.jit
def bce(params, x, y):
    z = predict(params, x)
    return jnp.mean(jnp.maximum(z, 0) - z * y + jnp.log1p(jnp.exp(-jnp.abs(z))))


data = load_breast_cancer()
X = jnp.array(StandardScaler().fit_transform(data.data), dtype=jnp.float32)
Y = jnp.array(data.target, dtype=jnp.float32)

params = init_mlp(jax.random.PRNGKey(42), [30, 32, 16, 1])
opt = Adam(params, lr=2e-3)
grad_fn = jax.jit(jax.grad(bce))
print("loss before training:", bce(params, X, Y))

for t in range(60):
    grads = grad_fn(params, X, Y)
    params = opt.step(params, grads, t)
    if t % 10 == 0:
        acc = jnp.mean((predict(params, X) > 0) == (Y > 0.5))
        print(f"t={t:3d}  loss={bce(params, X, Y):.4f}  acc={acc:.3f}")
