import jax
import jax.numpy as jnp
import numpy as np
import equinox as eqx
import optax
from sklearn.datasets import load_digits


class DeepClassifier(eqx.Module):
    layers: list
    out: eqx.nn.Linear

    def __init__(self, d_in, width, depth, n_classes, *, key):
        keys = jax.random.split(key, depth + 1)
        dims = [d_in] + [width] * depth
        self.layers = [eqx.nn.Linear(a, b, key=k) for a, b, k in zip(dims[:-1], dims[1:], keys)]
        self.out = eqx.nn.Linear(width, n_classes, key=keys[-1])

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return self.out(x)


def init_weights(model, key, std=0.02):
    is_linear = lambda m: isinstance(m, eqx.nn.Linear)
    linears = lambda m: [l for l in jax.tree_util.tree_leaves(m, is_leaf=is_linear) if is_linear(l)]
    n = len(linears(model))
    keys = jax.random.split(key, n)
    new_w = [std * jax.random.normal(k, l.weight.shape) for k, l in zip(keys, linears(model))]
    new_b = [jnp.zeros_like(l.bias) for l in linears(model)]
    model = eqx.tree_at(lambda m: [l.weight for l in linears(m)], model, new_w)
    return eqx.tree_at(lambda m: [l.bias for l in linears(m)], model, new_b)


def batches(x, y, size, steps, seed):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        i = rng.integers(0, len(x), size)
        yield x[i], y[i]


def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    perm = np.random.default_rng(0).permutation(len(x))
    tr, te = perm[:1400], perm[1400:]

    k_model, k_init = jax.random.split(jax.random.PRNGKey(3))
    model = DeepClassifier(64, 128, 12, 10, key=k_model)
    model = init_weights(model, k_init)

    tx = optax.adam(5e-4)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, opt_state, xb, yb):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, xb, yb)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    for it, (xb, yb) in enumerate(batches(x[tr], y[tr], 64, 300, 1)):
        model, opt_state, loss = step(model, opt_state, xb, yb)
        if it % 50 == 0 or it == 299:
            print(f"step {it:4d}  loss {float(loss):.4f}")

    pred = jax.vmap(model)(x[te]).argmax(-1)
    print("test accuracy", float((pred == y[te]).mean()))


if __name__ == "__main__":
    main()
