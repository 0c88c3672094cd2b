"""A small network for a differential equation, fitted with L-BFGS and its line search."""
import jax
import jax.numpy as jnp
import optax

jax.config.update("jax_enable_x64", True)


def init(key, sizes=(1, 24, 24, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:])]


def net(params, t):
    h = t[None]
    for w, b in params[:-1]:
        h = jnp.tanh(h @ w + b)
    w, b = params[-1]
    # The initial values u(0) = 1 and u'(0) = 0 hold by construction.
    return 1 + t**2 * (h @ w + b)[0]


def residual(params, t):
    """u'' + 0.4 u' + 4 u = 0."""
    du = jax.grad(net, argnums=1)
    ddu = jax.grad(du, argnums=1)
    return ddu(params, t) + 0.4 * du(params, t) + 4 * net(params, t)


def exact(t):
    w = jnp.sqrt(4 - 0.04)
    return jnp.exp(-0.2 * t) * (jnp.cos(w * t) + 0.2 / w * jnp.sin(w * t))


def main(steps=400):
    params = init(jax.random.key(0))
    t = jnp.linspace(0, 3, 60)

    def loss_fn(params):
        return jnp.mean(jax.vmap(residual, (None, 0))(params, t) ** 2)

    tx = optax.lbfgs(memory_size=20)
    state = tx.init(params)
    value_and_grad = optax.value_and_grad_from_state(loss_fn)

    @jax.jit
    def step(params, state):
        value, grad = value_and_grad(params, state=state)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss_fn)
        return optax.apply_updates(params, updates), state, value

    for i in range(steps):
        params, state, value = step(params, state)
        if i % 50 == 0:
            print(f"{i:3d} residual {float(value):.3e}")
    error = jnp.abs(jax.vmap(net, (None, 0))(params, t) - exact(t)).max()
    print(f"largest error {float(error):.2e}")


if __name__ == "__main__":
    main()
