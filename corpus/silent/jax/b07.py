from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_friedman1


@dataclass
class Config:
    hidden: int = 64
    lr: float = 5e-3
    batch_size: int = 100
    epochs: int = 20
    seed: int = 11


class Regressor(nn.Module):
    hidden: int

    def setup(self):
        self.fc1 = nn.Dense(self.hidden)
        self.fc2 = nn.Dense(self.hidden)
        self.out = nn.Dense(1)

    def __call__(self, x):
        x = nn.swish(self.fc1(x))
        x = nn.swish(self.fc2(x))
        return self.out(x)


def standardise(a):
    return (a - a.mean(0)) / a.std(0)


def run(cfg: Config):
    x, y = make_friedman1(n_samples=1400, noise=0.3, random_state=cfg.seed)
    x, y = standardise(x).astype(np.float32), standardise(y).astype(np.float32)
    xt, yt, xv, yv = x[:1000], y[:1000], x[1000:], y[1000:]
    model = Regressor(cfg.hidden)
    params = model.init(jax.random.PRNGKey(cfg.seed), xt[:1])["params"]
    tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(cfg.lr))
    opt_state = tx.init(params)

    def loss_fn(p, xb, yb):
        pred = model.apply({"params": p}, xb)
        return jnp.mean(jnp.square(pred - yb))

    @jax.jit
    def step(p, s, xb, yb):
        loss, g = jax.value_and_grad(loss_fn)(p, xb, yb)
        u, s = tx.update(g, s, p)
        return optax.apply_updates(p, u), s, loss

    rng = np.random.default_rng(cfg.seed)
    for epoch in range(cfg.epochs):
        total = 0.0
        for idx in np.array_split(rng.permutation(len(xt)), len(xt) // cfg.batch_size):
            params, opt_state, loss = step(params, opt_state, xt[idx], yt[idx])
            total += float(loss)
        if epoch % 4 == 3:
            print(f"epoch {epoch + 1:2d} loss {total / (len(xt) // cfg.batch_size):.4f}")
    pv = np.asarray(model.apply({"params": params}, xv)).ravel()
    r2 = 1 - np.sum((pv - yv) ** 2) / np.sum((yv - yv.mean()) ** 2)
    print(f"validation R2 {r2:.3f}")


if __name__ == "__main__":
    run(Config())
