"""Fine-tuning: stem frozen, middle at a tiny rate, new head at a normal rate."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import path_aware_map
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(24, (3, 3), name="stem")(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(48, (3, 3), name="mid")(x))
        return x.reshape(x.shape[0], -1)


class Classifier(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        h = Backbone(name="backbone")(x)
        rot = nn.Dense(2, name="side")(jax.lax.stop_gradient(h))
        return nn.Dense(self.classes, name="head")(h), rot


def fit(model, params, tx, x, y, side, steps, tag):
    state = tx.init(params)

    @jax.jit
    def step(params, state, xb, yb, sb):
        def f(p):
            logits, aux = model.apply({"params": p}, xb)
            main = optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()
            extra = optax.softmax_cross_entropy_with_integer_labels(aux, sb).mean()
            return main + 1e-3 * extra, main
        (loss, main), g = jax.value_and_grad(f, has_aux=True)(params)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, main

    rng = np.random.default_rng(0)
    for i in range(steps):
        j = rng.integers(0, len(x) - 300, 64)
        params, state, main = step(params, state, x[j], y[j], side[j])
        if i % 40 == 0 or i == steps - 1:
            print(f"{tag} {i:3d} loss {float(main):.4f}")
    acc = np.mean(np.asarray(model.apply({"params": params}, x[-300:])[0].argmax(-1)) == y[-300:])
    print(f"{tag} accuracy {acc:.3f}")
    return params


def main():
    d = load_digits()
    x = (d.images[..., None] / 8.0 - 1.0).astype(np.float32)
    y, side = d.target, (x.mean(axis=(1, 2, 3)) > x.mean()).astype(int)
    low = y < 5
    src = Classifier(5)
    params = src.init(jax.random.PRNGKey(0), x[:1])["params"]
    params = fit(src, params, optax.adam(2e-3), x[low], y[low], side[low], 120, "source")

    dst = Classifier(5)
    fresh = dst.init(jax.random.PRNGKey(1), x[:1])["params"]
    fresh = {**fresh, "backbone": params["backbone"]}

    def group(path, _):
        if path[0] == "backbone":
            return "frozen" if path[1] == "stem" else "slow"
        return "head"

    tx = optax.multi_transform(
        {"frozen": optax.set_to_zero(), "slow": optax.adam(1e-6), "head": optax.adam(2e-3)},
        path_aware_map(group, fresh))
    fit(dst, fresh, tx, x[~low], y[~low] - 5, side[~low], 160, "target")


if __name__ == "__main__":
    main()
