"""Adapt a small digit classifier to inverted, shifted images with low-rank adapters (equinox)."""
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from sklearn.datasets import load_digits


class LoRALinear(eqx.Module):
    base: eqx.nn.Linear
    a: jax.Array
    b: jax.Array
    scale: float = eqx.field(static=True)

    def __init__(self, base, rank, key, alpha=8.0):
        self.base = base
        self.a = jr.normal(key, (rank, base.in_features)) / np.sqrt(base.in_features)
        self.b = jnp.zeros((base.out_features, rank))
        self.scale = alpha / rank

    def __call__(self, x, *, key=None):
        return self.base(x) + self.scale * (self.b @ (self.a @ x))


def loss_fn(trainable, rest, x, y):
    model = eqx.combine(trainable, rest)
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def fit(model, spec, x, y, lr, steps, rng, tag):
    trainable, rest = eqx.partition(model, spec)
    opt = optax.adam(lr)
    state = opt.init(trainable)

    @eqx.filter_jit
    def step(trainable, state, xb, yb):
        loss, g = eqx.filter_value_and_grad(loss_fn)(trainable, rest, xb, yb)
        upd, state = opt.update(g, state)
        return eqx.apply_updates(trainable, upd), state, loss

    for i in range(steps):
        idx = rng.integers(0, len(x), 128)
        trainable, state, loss = step(trainable, state, x[idx], y[idx])
        if i % 30 == 0:
            print(f"[{tag}] {i:3d} loss {loss:.4f}")
    return eqx.combine(trainable, rest)


def accuracy(model, x, y):
    return float((jax.vmap(model)(x).argmax(-1) == y).mean())


rng = np.random.default_rng(0)
digits = load_digits()
X, Y = jnp.asarray(digits.images / 16.0, jnp.float32), jnp.asarray(digits.target)
X_new = jnp.roll(1.0 - X, 1, axis=2)
X, X_new = X.reshape(len(X), -1), X_new.reshape(len(X), -1)

model = eqx.nn.MLP(64, 10, 128, 2, key=jr.key(0))
model = fit(model, eqx.is_inexact_array, X[:1500], Y[:1500], 2e-3, 120, rng, "base")
print("base accuracy", accuracy(model, X[1500:], Y[1500:]), "on the new domain", accuracy(model, X_new[1500:], Y[1500:]))

keys = jr.split(jr.key(5), len(model.layers))
model = eqx.tree_at(lambda m: m.layers, model, tuple(LoRALinear(l, 6, k) for l, k in zip(model.layers, keys)))
spec = jax.tree.map(lambda _: False, model)
spec = eqx.tree_at(lambda m: [p for l in m.layers for p in (l.a, l.b)], spec, replace_fn=lambda _: True)
model = fit(model, spec, X_new[:1500], Y[:1500], 2e-2, 200, rng, "lora")
print("adapted accuracy", accuracy(model, X_new[1500:], Y[1500:]))
