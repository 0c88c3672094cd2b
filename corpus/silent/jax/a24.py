from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


@dataclass
class Config:
    epochs: int = 10
    batch_size: int = 64
    lr: float = 4e-3
    seed: int = 0


class LeNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, (2, 2), (2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(48)(x))
        return nn.Dense(10)(x)


def create_state(cfg, sample):
    model = LeNet()
    schedule = optax.cosine_decay_schedule(cfg.lr, decay_steps=cfg.epochs)
    tx = optax.adamw(schedule, weight_decay=1e-4)
    params = model.init(jax.random.PRNGKey(cfg.seed), sample)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, x, y):
    def f(params):
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn({"params": params}, x), y).mean()

    loss, grads = jax.value_and_grad(f)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def accuracy(state, x, y):
    return (state.apply_fn({"params": state.params}, x).argmax(-1) == y).mean()


def run(cfg):
    d = load_digits()
    x, y = jnp.asarray(d.images[..., None] / 16.0, jnp.float32), jnp.asarray(d.target)
    state, rng = create_state(cfg, x[:1]), np.random.default_rng(cfg.seed)
    for epoch in range(cfg.epochs):
        order = rng.permutation(1500)
        losses = []
        for k in range(len(order) // cfg.batch_size):
            i = order[k * cfg.batch_size:(k + 1) * cfg.batch_size]
            state, loss = train_step(state, x[i], y[i])
            losses.append(float(loss))
        print(f"epoch {epoch + 1}/{cfg.epochs} loss {np.mean(losses):.4f} val acc {float(accuracy(state, x[1500:], y[1500:])):.3f}")


if __name__ == "__main__":
    run(Config())
