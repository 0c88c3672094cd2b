import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from sklearn.datasets import load_digits


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2)(x))
        x = x.reshape(x.shape[0], -1)
        return nn.relu(nn.Dense(96)(x))


class Classifier(nn.Module):
    classes: int

    def setup(self):
        self.backbone = Backbone()
        self.head = nn.Dense(self.classes)

    def __call__(self, x):
        return self.head(self.backbone(x))


def fit(model, params, tx, x, y, steps, tag, seed=0):
    rng = np.random.default_rng(seed)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, xb, yb):
        def f(p):
            logits = model.apply({"params": p}, xb)
            return optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()
        loss, grads = jax.value_and_grad(f)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for i in range(steps):
        sel = rng.integers(0, len(x), 64)
        params, opt_state, loss = step(params, opt_state, x[sel], y[sel])
        if i % 40 == 0 or i == steps - 1:
            print(f"{tag} {i:3d} loss {float(loss):.4f}")
    return params


def main():
    x, y = load_digits(return_X_y=True)
    x = ((x - 4.9) / 6.0).reshape(-1, 8, 8, 1).astype(np.float32)
    source, target = y < 6, y >= 6
    xs, ys = x[source], y[source]
    xt, yt = x[target], y[target] - 6
    n = int(0.7 * len(xt))

    teacher = Classifier(6)
    pre = teacher.init(jax.random.key(0), xs[:1])["params"]
    pre = fit(teacher, pre, optax.adam(1e-3), xs, ys, 120, "source")

    student = Classifier(4)
    params = student.init(jax.random.key(1), xt[:1])["params"]
    params = {"backbone": pre["backbone"], "head": params["head"]}
    labels = traverse_util.path_aware_map(lambda path, _: "head" if path[0] == "head" else "frozen", params)
    tx = optax.multi_transform({"head": optax.adam(3e-3), "frozen": optax.set_to_zero()}, labels)
    params = fit(student, params, tx, xt[:n], yt[:n], 200, "target")

    logits = student.apply({"params": params}, xt[n:])
    print("target accuracy", float((logits.argmax(-1) == yt[n:]).mean()))


if __name__ == "__main__":
    main()
