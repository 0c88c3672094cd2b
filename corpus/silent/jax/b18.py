"""One-step forecast of room temperature (degrees, around 100 F) with an LSTM; warm-up from 0 and clipped gradients."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

WINDOW, STEPS, CLIP = 24, 280, 5.0


class Forecaster(nnx.Module):
    def __init__(self, hidden, rngs):
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(1, hidden, rngs=rngs))
        self.head = nnx.Linear(hidden, 1, rngs=rngs)
        self.centre = nnx.Param(jnp.asarray(95.0))

    def __call__(self, x):
        h = self.rnn((x[..., None] - 100.0) / 10.0)
        return self.centre[...] + 10.0 * self.head(h[:, -1])[:, 0]


def series(n, seed):
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    s = 100 + 8 * np.sin(2 * np.pi * t / 24) + 4 * np.sin(2 * np.pi * t / 7.3 + 1) + rng.normal(0, 0.5, n)
    return s.astype(np.float32)


def windows(s):
    v = np.lib.stride_tricks.sliding_window_view(s, WINDOW + 1)
    return v[:, :-1], v[:, -1]


def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def update(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    norm = optax.global_norm(grads)
    optimizer.update(model, grads)
    return loss, norm


xs, ys = windows(series(1500, 0))
xv, yv = windows(series(400, 1))
schedule = optax.warmup_cosine_decay_schedule(0.0, 1.5e-2, 30, STEPS, 1e-4)
tx = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(schedule))
model = Forecaster(32, nnx.Rngs(0))
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
rng = np.random.default_rng(0)
clipped = []
for i in range(STEPS):
    b = rng.integers(0, len(xs), 64)
    loss, norm = update(model, optimizer, xs[b], ys[b])
    clipped.append(float(norm) > CLIP)
    if i % 20 == 0:
        print(f"{i:4d} mse {float(loss):9.3f} clipped lately {np.mean(clipped[-20:]):.2f}")
print(f"validation mse {float(loss_fn(model, xv, yv)):.3f}  variance {yv.var():.3f}")
