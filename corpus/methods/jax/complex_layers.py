"""A complex-valued network that equalises a distorted radio signal."""
import jax
import jax.numpy as jnp
import optax

LEVELS = jnp.array([1 + 1j, 1 - 1j, -1 + 1j, -1 - 1j]) / 2**0.5


def complex_normal(key, shape):
    a, b = jax.random.split(key)
    return (jax.random.normal(a, shape) + 1j * jax.random.normal(b, shape)) / 2**0.5


def init(key, sizes=(7, 32, 32, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": complex_normal(k, (a, b)) / a**0.5, "b": jnp.zeros(b, jnp.complex64), "threshold": jnp.full(b, -0.1)}
        for k, a, b in zip(keys, sizes, sizes[1:])
    ]


def mod_relu(z, threshold):
    """The magnitude passes a threshold, the phase stays."""
    size = jnp.sqrt(z.real**2 + z.imag**2 + 1e-8)
    return z * (jax.nn.relu(size + threshold) / size)


def apply(params, z):
    for p in params[:-1]:
        z = mod_relu(z @ p["w"] + p["b"], p["threshold"])
    return (z @ params[-1]["w"] + params[-1]["b"])[:, 0]


def batch(key, n, taps, window=7):
    """Echoes, a phase that depends on the power, and noise."""
    a, b = jax.random.split(key)
    index = jax.random.randint(a, (n, 32), 0, 4)
    sent = LEVELS[index]
    x = sum(tap * jnp.roll(sent, k, -1) for k, tap in enumerate(taps))
    x = x * jnp.exp(0.5j * jnp.abs(x) ** 2) + 0.05 * complex_normal(b, x.shape)
    at = 16
    return x[:, at - window // 2 : at + window // 2 + 1], index[:, at]


def main(steps=600):
    taps = jnp.array([0.9, 0.4j, -0.25 + 0.1j])
    params, key = init(jax.random.key(0)), jax.random.key(1)
    for p in params[-1:]:
        del p["threshold"]
    tx = optax.adam(3e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        x, index = batch(key, 256, taps)

        def loss_fn(params):
            error = apply(params, x) - LEVELS[index]
            return jnp.mean(error.real**2 + error.imag**2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.tree.map(jnp.conj, grads)  # the direction of ascent is the conjugate
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        params, state, loss = step(params, state, sub)
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f}")
    x, index = batch(key, 4000, taps)
    made = jnp.abs(apply(params, x)[:, None] - LEVELS).argmin(1)
    raw = jnp.abs(x[:, 3:4] - LEVELS).argmin(1)
    print(f"symbol errors {float((made != index).mean()):.4f}, without the network {float((raw != index).mean()):.3f}")


if __name__ == "__main__":
    main()
