from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


@dataclass
class Config:
    hidden: tuple = (64, 64)
    lr: float = 2e-3
    steps: int = 350
    batch: int = 64
    seed: int = 0


class PriceNet(nn.Module):
    hidden: tuple

    @nn.compact
    def __call__(self, x):
        for h in self.hidden:
            x = nn.relu(nn.Dense(h)(x))
        return nn.Dense(1)(x).squeeze(-1)


class Houses:
    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        area = rng.gamma(6.0, 20.0, n)
        rooms = np.clip(np.round(area / 28 + rng.normal(0, 0.7, n)), 1, 9)
        age = rng.uniform(0, 90, n)
        distance = rng.exponential(8.0, n)
        price = 1900 * area + 9000 * rooms - 700 * age + 90000 * np.exp(-distance / 6) + 8000 * rng.normal(size=n)
        x = np.stack([area, rooms, age, distance], axis=1)
        x = (x - x.mean(0)) / x.std(0)
        self.x = x.astype(np.float32)
        self.y = price.astype(np.float32)
        self.cut = int(0.8 * n)
        self.rng = rng

    def sample(self, size):
        i = self.rng.integers(0, self.cut, size)
        return self.x[i], self.y[i]

    def held_out(self):
        return self.x[self.cut:], self.y[self.cut:]


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        pred = state.apply_fn({"params": params}, x)
        return jnp.mean((pred - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def run(cfg):
    data = Houses(3000, cfg.seed)
    model = PriceNet(cfg.hidden)
    params = model.init(jax.random.key(cfg.seed), jnp.ones((1, 4)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(cfg.lr))
    for i in range(1, cfg.steps + 1):
        state, loss = train_step(state, *data.sample(cfg.batch))
        if i % 50 == 0 or i == 1:
            print(f"[{i:03d}] loss={float(loss):.5g}")
    x, y = data.held_out()
    pred = np.asarray(model.apply({"params": state.params}, x))
    print("held-out R2:", 1 - ((pred - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())


if __name__ == "__main__":
    run(Config())
