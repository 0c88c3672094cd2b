from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


@dataclass
class Config:
    width: int = 96
    batch: int = 128
    steps: int = 200
    warmup: int = 30
    peak: float = 2e-3
    seed: int = 3


class PatchMixer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, img):
        b = img.shape[0]
        p = img.reshape(b, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(b, 16, 4)
        h = nn.Dense(self.width)(p)
        for _ in range(2):
            t = nn.LayerNorm()(h).swapaxes(1, 2)
            t = nn.Dense(16)(nn.gelu(nn.Dense(32)(t)))
            h = h + t.swapaxes(1, 2)
            c = nn.LayerNorm()(h)
            h = h + nn.Dense(self.width)(nn.gelu(nn.Dense(self.width)(c)))
        return nn.Dense(10)(nn.LayerNorm()(h).mean(1))


def batches(x, y, size, rng):
    while True:
        order = rng.permutation(len(x))
        for i in range(0, len(x) - size + 1, size):
            j = order[i:i + size]
            yield jnp.asarray(x[j]), jnp.asarray(y[j])


def train(cfg: Config):
    d = load_digits()
    x = (d.images.astype(np.float32) / 16.0 - 0.3) / 0.37
    y = d.target
    xtr, ytr, xte, yte = x[:1500], y[:1500], x[1500:], y[1500:]
    rng = np.random.default_rng(cfg.seed)
    model = PatchMixer(cfg.width)
    params = model.init(jax.random.PRNGKey(cfg.seed), jnp.zeros((1, 8, 8)))
    sched = optax.warmup_cosine_decay_schedule(1e-7, cfg.peak, cfg.warmup, cfg.steps)
    tx = optax.adamw(sched, weight_decay=1e-3)
    opt_state = tx.init(params)

    @jax.jit
    def update(params, opt_state, xb, yb):
        def loss_fn(p):
            logits = model.apply(p, xb)
            return optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        deltas, new_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, deltas)
        metrics = {"loss": loss, "gnorm": optax.global_norm(grads)}
        return new_params, opt_state, metrics

    @jax.jit
    def accuracy(params):
        return jnp.mean(model.apply(params, jnp.asarray(xte)).argmax(-1) == yte)

    feed = batches(xtr, ytr, cfg.batch, rng)
    for it in range(cfg.steps):
        xb, yb = next(feed)
        params, opt_state, m = update(params, opt_state, xb, yb)
        if it % 50 == 0 or it == cfg.steps - 1:
            print(f"step {it:3d} loss {float(m['loss']):.4f} gnorm {float(m['gnorm']):.3f} acc {float(accuracy(params)):.3f}")


train(Config())
