import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class DetectorConfig:
    size: int = 16
    width: int = 12
    prior: float = 0.01
    lr: float = 2e-3
    steps: int = 200
    batch: int = 24


class CenterDetector(nn.Module):
    cfg: DetectorConfig

    @nn.compact
    def __call__(self, x):
        p = self.cfg.prior
        conv = partial(nn.Conv, kernel_size=(3, 3), bias_init=nn.initializers.constant(-np.log((1 - p) / p)))
        for mult in (1, 2, 2):
            x = nn.relu(conv(self.cfg.width * mult)(x))
        return conv(1)(x)[..., 0]


def focal_loss(logits, target, gamma=2.0):
    ce = optax.sigmoid_binary_cross_entropy(logits, target)
    prob = jax.nn.sigmoid(logits)
    p_t = prob * target + (1 - prob) * (1 - target)
    return jnp.sum((1 - p_t) ** gamma * ce) / target.sum()


def scenes(rng, n, size):
    img = 0.1 * rng.random((n, size, size))
    heat = np.zeros((n, size, size))
    for k in range(n):
        for _ in range(rng.integers(1, 4)):
            r, c = rng.integers(2, size - 2, 2)
            img[k, r - 1:r + 2, c] += 0.6
            img[k, r, c - 1:c + 2] += 0.4
            heat[k, r, c] = 1.0
        r, c = rng.integers(2, size - 2, 2)
        img[k, r, c - 2:c + 2] += 0.7
    return img[..., None].astype(np.float32), heat.astype(np.float32)


def train(cfg):
    rng = np.random.default_rng(0)
    model = CenterDetector(cfg)
    params = model.init(jax.random.key(0), jnp.zeros((1, cfg.size, cfg.size, 1)))
    tx = optax.adam(cfg.lr)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, img, heat):
        def f(p):
            logits = model.apply(p, img)
            top = jnp.where(heat > 0, jax.nn.sigmoid(logits), 0.0).sum() / heat.sum()
            return focal_loss(logits, heat), top
        (loss, score), grads = jax.value_and_grad(f, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss, score

    for i in range(cfg.steps):
        params, opt_state, loss, score = step(params, opt_state, *scenes(rng, cfg.batch, cfg.size))
        if i % 25 == 0 or i == cfg.steps - 1:
            print(f"iter {i:3d} loss {float(loss):.4f} score at centers {float(score):.3f}")


if __name__ == "__main__":
    train(DetectorConfig())
