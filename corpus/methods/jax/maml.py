"""MAML on sine waves: the gradient goes through three unrolled steps of the inner loop."""
import jax
import jax.numpy as jnp
import optax


def init(key, sizes=(1, 40, 40, 1)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [(jax.random.normal(k, (a, b)) * (1 / (3 * a)) ** 0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:])]


def apply(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mse(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def adapt(params, x, y, steps=3, rate=0.01):
    for _ in range(steps):
        grads = jax.grad(mse)(params, x, y)
        params = jax.tree.map(lambda p, g: p - rate * g, params, grads)
    return params


def task(key, support, query):
    a, b, c = jax.random.split(key, 3)
    amplitude, phase = 0.5 + 4 * jax.random.uniform(a), jnp.pi * jax.random.uniform(b)
    x = jax.random.uniform(c, (support + query, 1), minval=-5, maxval=5)
    y = amplitude * jnp.sin(x + phase)
    return x[:support], y[:support], x[support:], y[support:]


def main(iterations=1500, tasks=8):
    key = jax.random.key(0)
    params = init(key)
    tx = optax.adam(1e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key):
        def outer(params, key):
            x, y, xq, yq = task(key, 10, 10)
            return mse(adapt(params, x, y), xq, yq)

        def loss_fn(params):
            return jax.vmap(outer, (None, 0))(params, jax.random.split(key, tasks)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for i in range(iterations):
        key, sub = jax.random.split(key)
        params, state, loss = step(params, state, sub)
        if i % 100 == 0:
            print(f"{i:4d} loss after adaptation {float(loss):.3f}")

    def errors(key):
        x, y, xq, yq = task(key, 10, 100)
        return mse(params, xq, yq), mse(adapt(params, x, y), xq, yq)

    before, after = jax.vmap(errors)(jax.random.split(key, 100))
    print(f"error before adaptation {float(before.mean()):.3f}, after {float(after.mean()):.3f}")


if __name__ == "__main__":
    main()
