"""A spiking network: leaky integrate-and-fire neurons with a surrogate gradient, digits as rates."""
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits


@jax.custom_vjp
def spike(u):
    """A step forward; the derivative of a fast sigmoid backward."""
    return (u > 0).astype(u.dtype)


spike.defvjp(lambda u: (spike(u), u), lambda u, g: (g / (1 + 10 * jnp.abs(u)) ** 2,))


def init(key, inputs=64, hidden=128, classes=10):
    a, b = jax.random.split(key)
    return {
        "w1": jax.random.normal(a, (inputs, hidden)) / inputs**0.5, "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(b, (hidden, classes)) / hidden**0.5, "b2": jnp.zeros(classes),
    }


def simulate(params, key, x, steps=20, decay=0.9, threshold=1.0):
    def tick(carry, key):
        u, out = carry
        events = jax.random.bernoulli(key, x).astype(x.dtype)
        u = decay * u + events @ params["w1"] + params["b1"]
        s = spike(u - threshold)
        u = u - threshold * jax.lax.stop_gradient(s)
        return (u, 0.9 * out + s @ params["w2"] + params["b2"]), s.mean()

    zero = jnp.zeros((len(x), params["w1"].shape[1])), jnp.zeros((len(x), params["w2"].shape[1]))
    (_, out), rates = jax.lax.scan(tick, zero, jax.random.split(key, steps))
    return 4 * out / steps, rates.mean()


def main(steps=250):
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]
    params, key = init(jax.random.key(0)), jax.random.key(2)
    tx = optax.adamax(5e-3)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key, x, y):
        def loss_fn(params):
            logits, rate = simulate(params, key, x)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss + 0.1 * (rate - 0.1) ** 2, rate

        (loss, rate), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, rate

    for i in range(steps):
        key, ka, kb = jax.random.split(key, 3)
        pick = jax.random.randint(ka, (128,), 0, 1400)
        params, state, loss, rate = step(params, state, kb, x[pick], y[pick])
        if i % 25 == 0:
            print(f"{i:4d} loss {float(loss):.4f} firing rate {float(rate):.3f}")
    logits, _ = simulate(params, key, x[1400:])
    print(f"test accuracy {float((logits.argmax(1) == y[1400:]).mean()):.3f}")


if __name__ == "__main__":
    main()
