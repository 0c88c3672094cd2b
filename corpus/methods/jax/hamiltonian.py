"""A Hamiltonian network: the time derivatives of a pendulum are gradients of a learned energy."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


def pendulum(z):
    q, p = z
    return jnp.array([p, -jnp.sin(q)])


def energy(z):
    return 0.5 * z[..., 1] ** 2 - jnp.cos(z[..., 0])


class Energy(nn.Module):
    @nn.compact
    def __call__(self, z):
        h = jnp.tanh(nn.Dense(64)(z))
        h = jnp.tanh(nn.Dense(64)(h))
        return nn.Dense(1)(h)[..., 0]


model = Energy()


def field(params, z):
    dq, dp = jax.grad(lambda z: model.apply(params, z))(z)
    return jnp.array([dp, -dq])


def rollout(f, z, steps, dt=0.05):
    def tick(z, _):
        k1 = f(z)
        k2 = f(z + dt / 2 * k1)
        k3 = f(z + dt / 2 * k2)
        k4 = f(z + dt * k3)
        z = z + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return z, z

    return jax.lax.scan(tick, z, None, length=steps)[1]


def main(steps=800):
    key = jax.random.key(0)
    params = model.init(key, jnp.zeros(2))
    tx = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        a, b = jax.random.split(key)
        z = (jax.random.uniform(a, (128, 2)) - 0.5) * jnp.array([5.0, 4.0])
        target = jax.vmap(pendulum)(z) + 0.02 * jax.random.normal(b, z.shape)

        def loss_fn(params):
            return jnp.mean((jax.vmap(field, (None, 0))(params, z) - target) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        params, state, loss = step(params, state, sub)
        if i % 100 == 0:
            print(f"{i:4d} loss {float(loss):.5f}")
    start = jnp.array([1.2, 0.0])
    path, true = rollout(lambda z: field(params, z), start, 200), rollout(pendulum, start, 200)
    drift = jnp.abs(energy(path) - energy(start)).max()
    print(f"energy drift {float(drift):.4f} path error {float(jnp.abs(path - true).max()):.3f}")


if __name__ == "__main__":
    main()
