"""Identify the rate constant and the reaction order of a batch reactor."""
import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax

T_END = 3.0
COARSE = 12          # integration steps used while fitting


# --- reference data: fine integration with the true constants ---------------
def simulate_truth(c0, k=3.2, n=1.5, steps=3000):
    c, dt, out = c0.copy(), T_END / steps, []
    for i in range(steps):
        c = c - dt * k * c**n
        if (i + 1) % (steps // COARSE) == 0:
            out.append(c)
    return np.stack(out)


C0 = np.linspace(0.4, 2.5, 8)
TARGET = jnp.asarray(simulate_truth(C0))


# --- model ------------------------------------------------------------------
def rate(theta, c):
    k = jax.nn.softplus(theta["k"])
    order = 1.0 + jax.nn.sigmoid(theta["order"])
    return k * c**order


def euler(theta, dt, c, _):
    c_next = c - dt * rate(theta, c)
    return c_next, c_next


def rollout(theta, c0):
    body = functools.partial(euler, theta, T_END / COARSE)
    _, traj = jax.lax.scan(body, c0, None, length=COARSE)
    return traj


def mse(theta):
    return jnp.mean((rollout(theta, jnp.asarray(C0)) - TARGET) ** 2)


theta = {"k": jnp.array(-1.0), "order": jnp.array(0.4)}
tx = optax.adam(0.3)
st = tx.init(theta)
fit = jax.jit(jax.value_and_grad(mse))
for it in range(300):
    val, g = fit(theta)
    up, st = tx.update(g, st)
    theta = optax.apply_updates(theta, up)
    if it % 20 == 0:
        k = float(jax.nn.softplus(theta["k"]))
        print(f"{it:3d} mse={float(val):.5f} k={k:.3f}")
