"""Fit a cubic polynomial vector field to Van der Pol trajectories by rolling it out,
lengthening the roll-out as training goes on."""
from functools import partial
import jax
import jax.numpy as jnp
import numpy as np

DT = 0.05
MU = 1.5


def true_rhs(s):
    x, y = s
    return np.array([y, MU * (1 - x**2) * y - x])


def simulate(s0, n):
    out = [np.array(s0, dtype=float)]
    for _ in range(n):
        s = out[-1]
        k1 = true_rhs(s); k2 = true_rhs(s + DT / 2 * k1)
        k3 = true_rhs(s + DT / 2 * k2); k4 = true_rhs(s + DT * k3)
        out.append(s + DT / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return np.stack(out)


def library(s):
    x, y = s[0], s[1]
    return jnp.stack([jnp.ones_like(x), x, y, x * x, x * y, y * y,
                      x**3, x**2 * y, x * y**2, y**3])


def rollout(xi, s0, n):
    def body(s, _):
        ds = library(s) @ xi
        s = s + DT * ds
        return s, s
    _, traj = jax.lax.scan(body, s0, None, length=n)
    return traj


@partial(jax.jit, static_argnums=2)
def train_step(xi, trajs, n, lr):
    def loss(xi):
        pred = jax.vmap(lambda tr: rollout(xi, tr[0], n))(trajs)
        return jnp.mean((pred - trajs[:, 1:n + 1]) ** 2)
    val, g = jax.value_and_grad(loss)(xi)
    gn = jnp.sqrt(jnp.sum(g * g))
    g = g * jnp.minimum(1.0, 1.0 / gn)
    return xi - lr * g, val


def main():
    rng = np.random.default_rng(0)
    starts = rng.uniform(-3.0, 3.0, size=(8, 2))
    trajs = jnp.asarray(np.stack([simulate(s, 240) for s in starts]), jnp.float32)
    xi = 0.12 * jax.random.normal(jax.random.PRNGKey(2), (10, 2))
    step = 0
    for horizon in (4, 8, 16, 40, 120, 240):
        for _ in range(25):
            xi, val = train_step(xi, trajs, horizon, 0.02)
            if step % 10 == 0:
                print(f"step {step:4d} horizon {horizon:3d} mse {float(val):.5f}")
            step += 1
    print("coefficients\n", np.round(np.asarray(xi), 3))


main()
