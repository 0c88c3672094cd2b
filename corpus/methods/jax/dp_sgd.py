"""DP-SGD: per-sample gradients by vmap, each clipped, with noise on their sum."""
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits


def init(key, inputs=64, hidden=64, classes=10):
    a, b = jax.random.split(key)
    return {
        "w1": jax.random.normal(a, (inputs, hidden)) / inputs**0.5, "b1": jnp.zeros(hidden),
        "w2": jax.random.normal(b, (hidden, classes)) / hidden**0.5, "b2": jnp.zeros(classes),
    }


def apply(params, x):
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    return h @ params["w2"] + params["b2"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), y)


def private(grads, key, bound, noise, batch):
    leaves, tree = jax.tree.flatten(grads)
    norms = jnp.sqrt(sum(jnp.sum(g.reshape(batch, -1) ** 2, 1) for g in leaves))
    factor = jnp.minimum(1.0, bound / (norms + 1e-6))
    sums = [jnp.tensordot(factor, g, 1) for g in leaves]
    keys = jax.random.split(key, len(sums))
    noisy = [(s + noise * bound * jax.random.normal(k, s.shape)) / batch for s, k in zip(sums, keys)]
    return jax.tree.unflatten(tree, noisy), norms


def main(steps=300, batch=256, bound=1.0, noise=0.6):
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]
    params, key = init(jax.random.key(0)), jax.random.key(2)
    tx = optax.sgd(0.5, momentum=0.9)
    state = tx.init(params)

    @jax.jit
    def step(params, state, key, x, y):
        losses, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))(params, x, y)
        grads, norms = private(grads, key, bound, noise, batch)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, losses.mean(), (norms > bound).mean()

    for i in range(steps):
        key, ka, kb = jax.random.split(key, 3)
        pick = jax.random.randint(ka, (batch,), 0, 1400)
        params, state, loss, clipped = step(params, state, kb, x[pick], y[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f} clipped {float(clipped):.2f}")
    print(f"test accuracy {float((apply(params, x[1400:]).argmax(1) == y[1400:]).mean()):.3f}")


if __name__ == "__main__":
    main()
