"""Quantization-aware training: weights and activations are rounded to four bits, straight through."""
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

LEVELS = 7


@jax.custom_vjp
def fake_quantize(x, scale):
    return jnp.clip(jnp.round(x / scale), -LEVELS, LEVELS) * scale


def forward(x, scale):
    return fake_quantize(x, scale), (jnp.abs(x / scale) <= LEVELS + 0.5, scale)


def backward(kept, g):
    inside, scale = kept
    return g * inside, jnp.zeros_like(scale)


fake_quantize.defvjp(forward, backward)


def init(key, sizes=(64, 96, 96, 10)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [{"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)} for k, a, b in zip(keys, sizes, sizes[1:])]


def apply(params, ranges, x, train):
    """Logits, and the ranges of the activations, which follow the batches."""
    new = []
    for i, (p, seen) in enumerate(zip(params, ranges)):
        seen = 0.95 * seen + 0.05 * jax.lax.stop_gradient(jnp.abs(x).max()) if train else seen
        new.append(seen)
        scale = jax.lax.stop_gradient(jnp.abs(p["w"]).max()) / LEVELS
        x = fake_quantize(x, seen / LEVELS) @ fake_quantize(p["w"], scale) + p["b"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return x, new


def main(steps=400):
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]
    params, key = init(jax.random.key(0)), jax.random.key(2)
    ranges = [jnp.asarray(1.0) for _ in params]
    tx = optax.adam(optax.cosine_decay_schedule(2e-3, steps))
    state = tx.init(params)

    @jax.jit
    def step(params, ranges, state, x, y):
        def loss_fn(params):
            logits, new = apply(params, ranges, x, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

        (loss, ranges), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), ranges, state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        pick = jax.random.randint(sub, (128,), 0, 1400)
        params, ranges, state, loss = step(params, ranges, state, x[pick], y[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f}")
    logits, _ = apply(params, ranges, x[1400:], False)
    print(f"test accuracy with four bits {float((logits.argmax(1) == y[1400:]).mean()):.3f}")


if __name__ == "__main__":
    main()
