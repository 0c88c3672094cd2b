# LSTM for sequence classification: which of four waveforms is it?
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn


def waves(n, seed, T=24):
    r = np.random.default_rng(seed)
    t = np.arange(T)[None, :]
    f, ph = r.uniform(0.08, 0.16, (n, 1)), r.uniform(0, 1, (n, 1))
    u = (f * t + ph) % 1.0
    kinds = np.stack([np.sin(2 * np.pi * u), np.sign(u - 0.5), 2 * u - 1, np.where(u < 0.15, 1.0, -0.3)], 1)
    y = r.integers(0, 4, n)
    x = kinds[np.arange(n), y] + 0.1 * r.normal(size=(n, T))
    return x[..., None].astype(np.float32), y


class Lstm(nn.Module):
    size: int

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.OptimizedLSTMCell(self.size))(x)
        return nn.Dense(4)(x.mean(axis=1))


def build_optimizer(lr, clip):
    return optax.chain(optax.clip_by_global_norm(clip), optax.sgd(lr, momentum=0.9))


class Fit:
    def __init__(self, model, tx, sample):
        self.model, self.tx = model, tx
        self.params = model.init(jax.random.PRNGKey(0), sample)
        self.state = tx.init(self.params)
        self.step = jax.jit(self._step)

    def loss(self, params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(self.model.apply(params, x), y).mean()

    def _step(self, params, state, x, y):
        l, g = jax.value_and_grad(self.loss)(params, x, y)
        u, state = self.tx.update(g, state, params)
        return optax.apply_updates(params, u), state, l

    def train(self, x, y, steps, bs):
        rng = np.random.default_rng(0)
        for s in range(steps):
            i = rng.integers(0, len(x), bs)
            self.params, self.state, l = self.step(self.params, self.state, x[i], y[i])
            if s % 30 == 0 or s == steps - 1:
                print(f"{s:>4} {float(l):.4f}")


x, y = waves(2000, 0)
fit = Fit(Lstm(32), build_optimizer(lr=0.3, clip=1e-3), x[:2])
fit.train(x, y, steps=300, bs=64)
xt, yt = waves(500, 1)
print("accuracy", float((fit.model.apply(fit.params, xt).argmax(-1) == yt).mean()))
