"""Lion, with an average of the weights that is used for evaluation."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.LayerNorm()(nn.Dense(128)(x)))
        x = nn.gelu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def main(steps=500):
    d = load_digits()
    order = jax.random.permutation(jax.random.key(1), len(d.data))
    x, y = jnp.asarray(d.data, jnp.float32)[order] / 16, jnp.asarray(d.target)[order]
    net, key = Net(), jax.random.key(0)
    params = net.init(key, x[:1])
    tx = optax.lion(optax.cosine_decay_schedule(3e-4, steps), weight_decay=0.3)
    state, average = tx.init(params), params

    @jax.jit
    def step(params, average, state, x, y):
        def loss_fn(params):
            labels = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.05)
            return optax.softmax_cross_entropy(net.apply(params, x), labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.98 * a + 0.02 * p, average, params)
        return params, average, state, loss

    for i in range(steps):
        key, sub = jax.random.split(key)
        pick = jax.random.randint(sub, (128,), 0, 1400)
        params, average, state, loss = step(params, average, state, x[pick], y[pick])
        if i % 50 == 0:
            print(f"{i:4d} loss {float(loss):.4f}")
    plain, averaged = (float((net.apply(p, x[1400:]).argmax(1) == y[1400:]).mean()) for p in (params, average))
    print(f"test accuracy {plain:.3f} averaged {averaged:.3f}")


if __name__ == "__main__":
    main()
