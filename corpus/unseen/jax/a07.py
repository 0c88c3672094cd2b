"""Rational-quadratic spline coupling flow (density estimation on two moons)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_moons

BOUND = 1.5
BINS = 6


def knots(raw):
    w, h, d = raw[:BINS], raw[BINS:2 * BINS], raw[2 * BINS:]
    w = 1e-2 + (1 - 1e-2 * BINS) * jax.nn.softmax(w)
    h = 1e-2 + (1 - 1e-2 * BINS) * jax.nn.softmax(h)
    xk = jnp.concatenate([jnp.zeros(1), jnp.cumsum(w)]) * 2 * BOUND - BOUND
    yk = jnp.concatenate([jnp.zeros(1), jnp.cumsum(h)]) * 2 * BOUND - BOUND
    slopes = jnp.concatenate([jnp.ones(1), 1e-3 + jax.nn.softplus(d + 0.54), jnp.ones(1)])
    return xk, yk, slopes


def spline_inverse(y, raw):
    xk, yk, slopes = knots(raw)
    inside = (y > -BOUND) & (y < BOUND)
    k = jnp.clip(jnp.searchsorted(yk, y) - 1, 0, BINS - 1)
    x0, x1, y0, y1 = xk[k], xk[k + 1], yk[k], yk[k + 1]
    d0, d1 = slopes[k], slopes[k + 1]
    s = (y1 - y0) / (x1 - x0)
    t = d1 + d0 - 2 * s
    a = (y1 - y0) * (s - d0) + (y - y0) * t
    b = (y1 - y0) * d0 - (y - y0) * t
    c = -s * (y - y0)
    disc = b ** 2 - 4 * a * c
    xi = 2 * c / (-b - jnp.sqrt(disc))
    x = xi * (x1 - x0) + x0
    den = s + t * xi * (1 - xi)
    dydx = s ** 2 * (d1 * xi ** 2 + 2 * s * xi * (1 - xi) + d0 * (1 - xi) ** 2) / den ** 2
    return jnp.where(inside, x, y), jnp.where(inside, -jnp.log(dydx), 0.0)


class Coupling(eqx.Module):
    net: eqx.nn.MLP
    flip: bool = eqx.field(static=True)

    def __init__(self, key, flip):
        self.net = eqx.nn.MLP(1, 3 * BINS - 1, 32, 2, activation=jax.nn.tanh, key=key)
        self.flip = flip

    def inverse(self, z):
        a, b = (z[1], z[0]) if self.flip else (z[0], z[1])
        b, logdet = spline_inverse(b, self.net(a[None]))
        return (jnp.stack([b, a]) if self.flip else jnp.stack([a, b])), logdet


class Flow(eqx.Module):
    layers: list

    def log_prob(self, x):
        total = 0.0
        for layer in self.layers:
            x, ld = layer.inverse(x)
            total = total + ld
        return total - 0.5 * jnp.sum(x ** 2) - jnp.log(2 * jnp.pi)


@eqx.filter_jit
def train_step(flow, state, batch):
    loss, g = eqx.filter_value_and_grad(lambda f: -jnp.mean(jax.vmap(f.log_prob)(batch)))(flow)
    upd, state = opt.update(g, state, eqx.filter(flow, eqx.is_array))
    return eqx.apply_updates(flow, upd), state, loss


data, _ = make_moons(3000, noise=0.1, random_state=1)
data = jnp.asarray((data - data.mean(0)) / data.std(0), jnp.float32)
keys = jax.random.split(jax.random.PRNGKey(0), 4)
flow = Flow([Coupling(k, i % 2 == 1) for i, k in enumerate(keys)])
opt = optax.adam(3e-3)
state = opt.init(eqx.filter(flow, eqx.is_array))
rng = np.random.default_rng(0)
for it in range(120):
    flow, state, loss = train_step(flow, state, data[rng.integers(0, 3000, 64)])
    if it % 10 == 0:
        print(it, "nll", float(loss))
