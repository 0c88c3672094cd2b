"""LoRA: a classifier is pretrained on digits, and adapters with B = 0 adapt it to shifted images."""
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits


def init(key, sizes=(64, 128, 128, 10)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [{"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)} for k, a, b in zip(keys, sizes, sizes[1:])]


def init_lora(key, params, rank=4):
    keys = jax.random.split(key, len(params))
    return [
        {"a": jax.random.normal(k, (p["w"].shape[0], rank)) / p["w"].shape[0] ** 0.5, "b": jnp.zeros((rank, p["w"].shape[1]))}
        for k, p in zip(keys, params)
    ]


def apply(params, x, lora=None, scale=2.0):
    for i, p in enumerate(params):
        h = x @ p["w"] + p["b"]
        if lora is not None:
            h = h + scale * (x @ lora[i]["a"] @ lora[i]["b"])
        x = jax.nn.relu(h) if i < len(params) - 1 else h
    return x


def fit(loss_fn, params, x, y, steps, lr, key):
    tx = optax.adamw(lr, weight_decay=0.0)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        pick = jax.random.randint(sub, (64,), 0, len(x))
        params, state, loss = step(params, state, x[pick], y[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f} trained {sum(p.size for p in jax.tree.leaves(params))}")
    return params


def main():
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]

    def cross_entropy(logits, y):
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    base = fit(lambda p, x, y: cross_entropy(apply(p, x), y), init(jax.random.key(0)), x[:1400], y[:1400], 300, 2e-3, jax.random.key(2))
    other = jnp.roll(x, 1, axis=1) + 0.1

    def accuracy(x, lora=None):
        return float((apply(base, x[1400:], lora).argmax(1) == y[1400:]).mean())

    print(f"base {accuracy(x):.3f}, shifted {accuracy(other):.3f}")
    lora = fit(lambda p, x, y: cross_entropy(apply(base, x, p), y), init_lora(jax.random.key(3), base), other[:1400], y[:1400], 300, 5e-3, jax.random.key(4))
    print(f"shifted, adapted {accuracy(other, lora):.3f}")


if __name__ == "__main__":
    main()
