"""Adapt a pretrained classifier to turned images with low-rank adapters."""
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class LoRALinear(eqx.Module):
    base: eqx.nn.Linear
    a: jax.Array
    b: jax.Array
    alpha: float = eqx.field(static=True)

    def __init__(self, base, rank, key, alpha=8.0):
        self.base = base
        self.a = jax.random.normal(key, (rank, base.in_features)) / np.sqrt(base.in_features)
        self.b = jnp.zeros((base.out_features, rank))
        self.alpha = alpha / rank

    def __call__(self, x):
        return self.base(x) + self.alpha * (self.b @ (self.a @ x))


class Net(eqx.Module):
    layers: list

    def __init__(self, sizes, key):
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = [eqx.nn.Linear(m, n, key=k) for m, n, k in zip(sizes[:-1], sizes[1:], keys)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


def train(model, spec, x, y, steps, lr, seed, tag):
    trainable, frozen = eqx.partition(model, spec)
    tx = optax.adam(lr)
    opt_state = tx.init(trainable)

    def loss_fn(trainable, xb, yb):
        m = eqx.combine(trainable, frozen)
        logits = jax.vmap(m)(xb)
        return optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()

    @eqx.filter_jit
    def step(trainable, opt_state, xb, yb):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(trainable, xb, yb)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(trainable, updates), opt_state, loss

    rng = np.random.default_rng(seed)
    for i in range(steps):
        idx = rng.integers(0, len(x), 64)
        trainable, opt_state, loss = step(trainable, opt_state, x[idx], y[idx])
        if i % 40 == 0:
            print(f"{tag} {i:3d} loss {float(loss):.4f}")
    return eqx.combine(trainable, frozen)


def accuracy(model, x, y):
    return float((jax.vmap(model)(jnp.asarray(x)).argmax(-1) == y).mean())


def main():
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32)
    turned = x.reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 64)
    key, k1, *lk = jax.random.split(jax.random.PRNGKey(0), 5)

    net = Net([64, 128, 128, 10], k1)
    net = train(net, jax.tree_util.tree_map(eqx.is_array, net), x[:1200], y[:1200], 150, 2e-3, 0, "pretrain")
    print("clean acc", accuracy(net, x[1200:], y[1200:]), "turned acc", accuracy(net, turned[1200:], y[1200:]))

    net = eqx.tree_at(lambda n: n.layers, net, [LoRALinear(l, 8, k) for l, k in zip(net.layers, lk)])
    spec = jax.tree_util.tree_map(lambda _: False, net)
    for i in range(len(net.layers)):
        spec = eqx.tree_at(lambda s: (s.layers[i].a, s.layers[i].b), spec, (True, True))
    net = train(net, spec, turned[:1200], y[:1200], 300, 1e-2, 1, "adapt")
    print("turned acc after adapters", accuracy(net, turned[1200:], y[1200:]))


main()
