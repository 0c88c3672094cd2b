"""GRU that reads a digit row by row (8 rows of 8 pixels)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits


class RowReader(nn.Module):
    hidden: int = 48
    classes: int = 10

    @nn.compact
    def __call__(self, rows):
        h = nn.RNN(nn.GRUCell(features=self.hidden))(rows)
        h = nn.LayerNorm()(h[:, -1])
        return nn.Dense(self.classes)(h)


def batches(x, y, size, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        idx = rng.integers(0, len(x), size)
        yield jnp.asarray(x[idx]), jnp.asarray(y[idx])


def main():
    data = load_digits()
    x = (data.images / 16.0).astype("float32")
    y = data.target.copy()
    noisy = np.random.default_rng(3).random(len(y)) < 0.05
    y[noisy] = np.random.default_rng(4).integers(0, 10, noisy.sum())
    xtr, ytr, xte, yte = x[:1400], y[:1400], x[1400:], data.target[1400:]

    model = RowReader()
    params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, 8, 8)))["params"]
    tx = optax.adam(optax.cosine_decay_schedule(3e-2, 300))

    def loss_fn(p, xb, yb):
        logits = model.apply({"params": p}, xb)
        return optax.softmax_cross_entropy_with_integer_labels(logits, yb).mean()

    @jax.jit
    def train_step(p, xb, yb):
        loss, grads = jax.value_and_grad(loss_fn)(p, xb, yb)
        opt_state = tx.init(p)
        updates, opt_state = tx.update(grads, opt_state, p)
        return optax.apply_updates(p, updates), loss

    running = None
    for step, (xb, yb) in enumerate(batches(xtr, ytr, 16, 300)):
        params, loss = train_step(params, xb, yb)
        running = float(loss) if running is None else 0.95 * running + 0.05 * float(loss)
        if step % 50 == 49:
            print(f"step {step + 1:4d}  loss {running:.4f}")
    logits = model.apply({"params": params}, jnp.asarray(xte))
    print(f"test accuracy {float((logits.argmax(-1) == yte).mean()):.3f}")


if __name__ == "__main__":
    main()
