from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


@dataclass(frozen=True)
class Config:
    width: int = 96
    blocks: int = 24
    steps: int = 300
    warmup: int = 60
    batch: int = 64
    lr: float = 2e-3
    wd: float = 1e-2


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        h = nn.Dense(2 * self.width)(h)
        h = nn.gelu(h)
        h = nn.Dense(self.width, kernel_init=nn.initializers.zeros)(h)
        return x + h


class ResNetMLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.cfg.width)(x)
        for _ in range(self.cfg.blocks):
            x = Block(self.cfg.width)(x)
        x = nn.LayerNorm()(x)
        return nn.Dense(10, kernel_init=nn.initializers.zeros)(x)


def create_state(cfg, key):
    model = ResNetMLP(cfg)
    params = model.init(key, jnp.zeros((1, 64)))["params"]
    schedule = optax.join_schedules(
        [optax.linear_schedule(0.0, cfg.lr, cfg.warmup),
         optax.cosine_decay_schedule(cfg.lr, cfg.steps - cfg.warmup)],
        boundaries=[cfg.warmup],
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=cfg.wd))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def predict(state, x):
    return state.apply_fn({"params": state.params}, x).argmax(-1)


def main():
    cfg = Config()
    digits = load_digits()
    x = (digits.data / 16.0).astype(np.float32)
    x = x - x.mean(0)
    y = digits.target
    perm = np.random.default_rng(1).permutation(len(x))
    tr, te = perm[:1400], perm[1400:]

    state = create_state(cfg, jax.random.PRNGKey(0))
    rng = np.random.default_rng(7)
    for step in range(cfg.steps):
        b = rng.choice(tr, cfg.batch, replace=False)
        state, loss = train_step(state, x[b], y[b])
        if step % 25 == 0 or step == cfg.steps - 1:
            print(f"[{step:03d}] loss={float(loss):.4f}")
    print("test acc:", float((predict(state, x[te]) == y[te]).mean()))


main()
