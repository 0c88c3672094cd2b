import functools
import jax
import jax.numpy as jnp
from jax import lax

GAMMA = 0.1


def softmin3(a, b, c):
    z = jnp.stack([a, b, c]) / -GAMMA
    return -GAMMA * jax.nn.logsumexp(z)


def soft_dtw(x, y):
    D = (x[:, None] - y[None, :]) ** 2
    m = y.shape[0]
    first = jnp.concatenate([jnp.zeros(1), jnp.full(m, jnp.inf)])

    def row(prev, d_row):
        def cell(left, inp):
            up, diag, d = inp
            r = d + softmin3(left, up, diag)
            return r, r

        _, cur = lax.scan(cell, jnp.inf, (prev[1:], prev[:-1], d_row))
        return jnp.concatenate([jnp.array([jnp.inf]), cur]), None

    last, _ = lax.scan(row, first, D)
    return last[-1]


def make_series(key, n, length):
    k1, k2, k3 = jax.random.split(key, 3)
    shift = jax.random.uniform(k1, (n, 1), minval=-0.6, maxval=0.6)
    stretch = jax.random.uniform(k2, (n, 1), minval=0.8, maxval=1.2)
    t = jnp.linspace(0.0, 2 * jnp.pi, length)[None, :]
    return jnp.sin(stretch * t + shift) + 0.05 * jax.random.normal(k3, (n, length))


@jax.jit
def barycenter_loss(z, series):
    return jnp.mean(jax.vmap(functools.partial(soft_dtw, z))(series))


@functools.partial(jax.jit, static_argnames="lr")
def update(z, vel, series, lr):
    loss, g = jax.value_and_grad(barycenter_loss)(z, series)
    vel = 0.8 * vel - lr * g
    return z + vel, vel, loss


key = jax.random.PRNGKey(0)
key, sub = jax.random.split(key)
data = make_series(sub, 24, 30)
z = jnp.zeros(30)
vel = jnp.zeros_like(z)
best_loss, best_z = jnp.inf, None
for epoch in range(60):
    key, sub = jax.random.split(key)
    pick = jax.random.permutation(sub, 24)[:12]
    z, vel, loss = update(z, vel, data[pick], lr=0.02)
    if loss < best_loss:
        best_loss, best_z = loss, z
    if epoch % 10 == 0:
        print(f"epoch {epoch:3d}  loss {float(loss):.4f}  best {float(best_loss):.4f}")
print("final", float(barycenter_loss(best_z, data)), bool(jnp.all(jnp.isfinite(best_z))))
