"""A deep equilibrium model: the output is a fixed point, and its gradient comes from the implicit function theorem."""
from functools import partial

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits


def iterate(f, z, tolerance=1e-5, most=60):
    def unfinished(carry):
        old, new, i = carry
        return (jnp.linalg.norm(new - old) > tolerance * (1 + jnp.linalg.norm(new))) & (i < most)

    def body(carry):
        _, new, i = carry
        return new, f(new), i + 1

    return jax.lax.while_loop(unfinished, body, (z, f(z), 0))[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fixed_point(f, params, x):
    return iterate(lambda z: f(params, x, z), jnp.zeros_like(x))


def forward(f, params, x):
    z = fixed_point(f, params, x)
    return z, (params, x, z)


def backward(f, kept, g):
    params, x, z = kept
    _, by_z = jax.vjp(lambda z: f(params, x, z), z)
    _, by_rest = jax.vjp(lambda params, x: f(params, x, z), params, x)
    u = iterate(lambda u: by_z(u)[0] + g, g)
    return by_rest(u)


fixed_point.defvjp(forward, backward)


def layer_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def cell(params, x, z):
    return jnp.tanh(z @ params["inner"] + x * params["gain"] + params["shift"])


def init(key, inputs=64, dim=64, classes=10):
    a, b, c = jax.random.split(key, 3)
    return {
        "read": jax.random.normal(a, (inputs, dim)) / inputs**0.5,
        "cell": {"inner": 0.3 * jax.random.normal(b, (dim, dim)) / dim**0.5, "gain": jnp.ones(dim), "shift": jnp.zeros(dim)},
        "head": jax.random.normal(c, (dim, classes)) / dim**0.5,
        "bias": jnp.zeros(classes),
    }


def apply(params, x):
    h = layer_norm(x @ params["read"])
    return fixed_point(cell, params["cell"], h) @ params["head"] + params["bias"]


def main(steps=300):
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]
    params, key = init(jax.random.key(0)), jax.random.key(2)
    tx = optax.adam(2e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        pick = jax.random.randint(sub, (128,), 0, 1400)
        params, state, loss = step(params, state, x[pick], y[pick])
        if i % 30 == 0:
            print(f"{i:4d} loss {float(loss):.4f}")
    print(f"test accuracy {float((apply(params, x[1400:]).argmax(1) == y[1400:]).mean()):.3f}")


if __name__ == "__main__":
    main()
