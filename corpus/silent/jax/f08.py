"""Adapting a pretrained classifier to rotated digits with low-rank adapters."""
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
        self.a = jax.random.normal(key, (rank, base.in_features)) / jnp.sqrt(base.in_features)
        self.b = jnp.zeros((base.out_features, rank))
        self.alpha = alpha

    def __call__(self, x):
        return self.base(x) + self.b @ (self.a @ x) * (self.alpha / self.a.shape[0])


class Classifier(eqx.Module):
    layers: list

    def __init__(self, key):
        k = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(64, 128, key=k[0]), eqx.nn.Linear(128, 128, key=k[1]),
                       eqx.nn.Linear(128, 10, key=k[2])]

    def __call__(self, x):
        for l in self.layers[:-1]:
            x = jax.nn.relu(l(x))
        return self.layers[-1](x)


def xent(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def fit(model, spec, x, y, lr, steps, tag):
    train, fixed = eqx.partition(model, spec)
    tx = optax.adam(lr)
    state = tx.init(train)

    @eqx.filter_jit
    def step(train, state, xb, yb):
        def f(t):
            return xent(jax.vmap(eqx.combine(t, fixed))(xb), yb)
        loss, g = eqx.filter_value_and_grad(f)(train)
        up, state = tx.update(g, state)
        return eqx.apply_updates(train, up), state, loss

    rng = np.random.default_rng(0)
    for i in range(steps):
        j = rng.integers(0, 1400, 96)
        train, state, loss = step(train, state, x[j], y[j])
        if i % 50 == 0 or i == steps - 1:
            print(f"{tag} {i:3d} loss {float(loss):.4f}")
    model = eqx.combine(train, fixed)
    acc = jnp.mean(jax.vmap(model)(x[1400:]).argmax(-1) == y[1400:])
    print(f"{tag} accuracy {float(acc):.3f}")
    return model


def main():
    d = load_digits()
    x = (d.data / 8.0 - 1.0).astype(np.float32)
    rot = np.rot90(d.images, axes=(1, 2)).reshape(-1, 64).astype(np.float32) / 8.0 - 1.0
    y = d.target
    net = Classifier(jax.random.PRNGKey(0))
    net = fit(net, jax.tree.map(eqx.is_inexact_array, net), x, y, 2e-3, 120, "pretrain")
    keys = jax.random.split(jax.random.PRNGKey(1), 3)
    net = eqx.tree_at(lambda m: m.layers, net,
                      [LoRALinear(l, 8, k) for l, k in zip(net.layers, keys)])
    spec = jax.tree.map(lambda _: False, net)
    spec = eqx.tree_at(lambda m: [w for l in m.layers for w in (l.a, l.b)], spec, [True] * 6)
    fit(net, spec, rot, y, 3e-3, 250, "adapt")


if __name__ == "__main__":
    main()
