"""Domain adversarial training: a gradient reversal layer whose factor warms up from 0."""
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


@jax.custom_vjp
def reverse(x, factor):
    return x


reverse.defvjp(lambda x, factor: (x, factor), lambda factor, g: (-factor * g, jnp.zeros_like(factor)))


class DANN(nn.Module):
    hidden: int = 64

    @nn.compact
    def __call__(self, x, factor):
        h = nn.relu(nn.Dense(self.hidden)(x))
        h = nn.relu(nn.Dense(self.hidden)(h))
        label = nn.Dense(2, name="label")(h)
        d = nn.relu(nn.Dense(self.hidden)(reverse(h, factor)))
        return label, nn.Dense(2, name="domain")(d)


def batch(key, n, target):
    """The label is in the first two features; the domain shifts and stretches the others."""
    x = jax.random.normal(key, (n, 8))
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    if target:
        x = x.at[:, 2:5].add(1.5).at[:, 5:].multiply(1.5)
    return x, y


def main(steps=800):
    model, key = DANN(), jax.random.key(0)
    params = model.init(key, jnp.zeros((1, 8)), 0.0)
    tx = optax.adam(1e-3)
    state = tx.init(params)
    where = jnp.repeat(jnp.arange(2), 128)

    @jax.jit
    def step(params, state, key, factor):
        ka, kb = jax.random.split(key)
        source, y = batch(ka, 128, False)
        target, _ = batch(kb, 128, True)

        def loss_fn(params):
            label, domain = model.apply(params, jnp.concatenate([source, target]), factor)
            task = optax.softmax_cross_entropy_with_integer_labels(label[:128], y).mean()
            adversary = optax.softmax_cross_entropy_with_integer_labels(domain, where).mean()
            return task + 0.3 * adversary, (domain.argmax(1) == where).mean()

        (loss, guess), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, loss, guess

    for i in range(steps):
        factor = 2 / (1 + math.exp(-10 * i / steps)) - 1
        key, sub = jax.random.split(key)
        params, state, loss, guess = step(params, state, sub, jnp.asarray(factor))
        if i % 100 == 0:
            print(f"{i:4d} loss {float(loss):.4f} factor {factor:.2f} domain accuracy {float(guess):.2f}")
    x, y = batch(key, 2000, True)
    print(f"target accuracy {float((model.apply(params, x, 0.0)[0].argmax(1) == y).mean()):.3f}")


if __name__ == "__main__":
    main()
