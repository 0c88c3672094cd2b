import jax
import jax.numpy as jnp
import numpy as np
import optax

# Smooth a camera trajectory: fit one unit quaternion per frame to observed
# point clouds, with a penalty on the rotation angle between adjacent frames.
T, P = 20, 15
rs = np.random.RandomState(7)
points = jnp.asarray(rs.randn(P, 3))


def rotate(q, v):
    w, u = q[..., :1], q[..., 1:]
    w, u = w[:, None, :], u[:, None, :]
    t = 2.0 * jnp.cross(u, v[None])
    return v[None] + w * t + jnp.cross(u, t)


def unit(q):
    return q / jnp.linalg.norm(q, axis=-1, keepdims=True)


half = 0.5 * np.linspace(0.0, 1.2, T)
true_q = np.stack([np.cos(half), np.zeros(T), np.sin(half), np.zeros(T)], -1)
observed = rotate(jnp.asarray(true_q), points) + 0.03 * rs.randn(T, P, 3)


def step_angles(q):
    """Geodesic angle between neighbouring orientations."""
    dots = jnp.sum(q[1:] * q[:-1], axis=-1)
    dots = jnp.clip(jnp.abs(dots), 0.0, 1.0)
    return 2.0 * jnp.arccos(dots)


def objective(raw):
    q = unit(raw)
    data = jnp.mean((rotate(q, points) - observed) ** 2)
    smooth = jnp.mean(step_angles(q) ** 2)
    return data + 0.1 * smooth


raw = jnp.tile(jnp.array([1.0, 0.0, 0.0, 0.0]), (T, 1))
optimizer = optax.adam(0.02)
opt_state = optimizer.init(raw)
value_grad = jax.jit(jax.value_and_grad(objective))

for epoch in range(200):
    value, grad = value_grad(raw)
    delta, opt_state = optimizer.update(grad, opt_state)
    raw = optax.apply_updates(raw, delta)
    if epoch % 20 == 0:
        print(epoch, float(value))
err = jnp.abs(jnp.sum(unit(raw) * true_q, -1))
print("mean |<q, q*>|:", float(err.mean()))
