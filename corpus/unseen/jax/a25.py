"""Heading regression: network outputs a von Mises distribution over the angle."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def log_i0(k):
    return jnp.log(jax.scipy.special.i0(k))


def von_mises_logpdf(theta, mu, kappa):
    return kappa * jnp.cos(theta - mu) - jnp.log(2 * jnp.pi) - log_i0(kappa)


class HeadingNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.l1 = nnx.Linear(4, 64, rngs=rngs)
        self.l2 = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 3, rngs=rngs)

    def __call__(self, x):
        h = nnx.tanh(self.l1(x))
        h = nnx.tanh(self.l2(h))
        o = self.head(h)
        mu = jnp.arctan2(o[..., 0], o[..., 1] + 1e-3)
        kappa = jnp.exp(o[..., 2])
        return mu, kappa


def dataset(n, seed):
    rng = np.random.default_rng(seed)
    v = rng.uniform(-1, 1, (n, 2))
    wind = rng.uniform(-0.3, 0.3, (n, 2))
    ang = np.arctan2(v[:, 1] + wind[:, 1], v[:, 0] + wind[:, 0]) + 0.01 * rng.standard_normal(n)
    return np.c_[v, wind].astype(np.float32), ang.astype(np.float32)


def nll(model, x, ang):
    mu, kappa = model(x)
    return -jnp.mean(von_mises_logpdf(ang, mu, kappa)), kappa


@nnx.jit
def train_step(model, opt, x, ang):
    (loss, kappa), grads = nnx.value_and_grad(nll, has_aux=True)(model, x, ang)
    opt.update(model, grads)
    return loss, jnp.max(kappa)


@nnx.jit
def evaluate(model, x, ang):
    mu, _ = model(x)
    return jnp.mean(jnp.abs(jnp.angle(jnp.exp(1j * (mu - ang)))))


X, A = dataset(2000, 0)
Xv, Av = dataset(500, 1)
model = HeadingNet(nnx.Rngs(0))
opt = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
rng = np.random.default_rng(3)
for it in range(600):
    i = rng.integers(0, len(X), 64)
    loss, kmax = train_step(model, opt, X[i], A[i])
    if it % 40 == 0:
        print(f"{it:4d} nll {float(loss):.4f} max kappa {float(kmax):.1f} val |err| {float(evaluate(model, Xv, Av)):.4f}")
