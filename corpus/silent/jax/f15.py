from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


@dataclass
class Settings:
    hidden: list = field(default_factory=lambda: [96, 96])
    lr: float = 1e-3
    decay: float = 2e-2
    epochs: int = 40
    batch: int = 48
    noise: float = 0.1


def glorot(key, a, b):
    lim = np.sqrt(6.0 / (a + b))
    return jax.random.uniform(key, (a, b), minval=-lim, maxval=lim)


def build(key, sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [{"w": glorot(k, a, b), "b": jnp.zeros(b)}
            for k, a, b in zip(keys, sizes[:-1], sizes[1:])]


def logits_of(params, x):
    for p in params[:-1]:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def bce(params, x, y):
    return optax.sigmoid_binary_cross_entropy(logits_of(params, x), y).mean()


def make_optimizer(s):
    kernels = lambda p: jax.tree.map(lambda a: a.ndim > 1, p)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(s.lr),
        optax.add_decayed_weights(s.decay, mask=kernels),
    )


def main():
    s = Settings()
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x).astype(np.float32)
    xtr, xte, ytr, yte = train_test_split(x, y.astype(np.float32), test_size=0.3, random_state=0)
    params = build(jax.random.PRNGKey(0), [x.shape[1], *s.hidden, 1])
    tx = make_optimizer(s)
    state = tx.init(params)
    test_loss = jax.jit(bce)

    @jax.jit
    def step(params, state, xb, yb):
        loss, grads = jax.value_and_grad(bce)(params, xb, yb)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(2)
    for epoch in range(s.epochs):
        order = rng.permutation(len(xtr))
        run = []
        for i in range(0, len(order) - s.batch + 1, s.batch):
            j = order[i:i + s.batch]
            xb = xtr[j] + s.noise * rng.normal(size=xtr[j].shape).astype(np.float32)
            params, state, loss = step(params, state, xb, ytr[j])
            run.append(float(loss))
        if epoch % 5 == 4:
            print(f"epoch {epoch + 1:2d} train {np.mean(run):.4f} test {float(test_loss(params, xte, yte)):.4f}")


if __name__ == "__main__":
    main()
