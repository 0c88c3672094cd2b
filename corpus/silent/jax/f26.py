import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState


class LSTMForecaster(nn.Module):
    hidden: int = 48

    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)
        return nn.Dense(1)(h[:, -1])[:, 0]


def waves(seed, n, length=30):
    """Two beating sinusoids; predict the value eight ticks ahead."""
    r = np.random.default_rng(seed)
    f1, f2 = r.uniform(0.15, 0.25, (n, 1)), r.uniform(0.4, 0.6, (n, 1))
    ph = r.uniform(0, 2 * np.pi, (n, 2))
    t = np.arange(length + 8)
    s = np.sin(f1 * t + ph[:, :1]) + 0.6 * np.sin(f2 * t + ph[:, 1:])
    s = s + 0.02 * r.normal(size=s.shape)
    return s[:, :length, None].astype(np.float32), s[:, -1].astype(np.float32)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--batch-size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--final-factor", type=float, default=0.0)
    args = ap.parse_args()

    x, y = waves(0, 2048)
    xv, yv = waves(1, 512)
    steps_per_epoch = len(x) // args.batch_size
    schedule = optax.cosine_decay_schedule(args.lr, decay_steps=args.epochs, alpha=args.final_factor)
    model = LSTMForecaster()
    params = model.init(jax.random.PRNGKey(0), x[:1])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state, xb, yb):
        def f(p):
            return jnp.mean((state.apply_fn(p, xb) - yb) ** 2)
        loss, g = jax.value_and_grad(f)(state.params)
        return state.apply_gradients(grads=g), loss

    @jax.jit
    def val_loss(state):
        return jnp.mean((state.apply_fn(state.params, xv) - yv) ** 2)

    rng = np.random.default_rng(3)
    for epoch in range(args.epochs):
        order = rng.permutation(len(x)).reshape(steps_per_epoch, args.batch_size)
        losses = []
        for j in order:
            state, loss = train_step(state, x[j], y[j])
            losses.append(float(loss))
        print(f"epoch {epoch} train {np.mean(losses):.4f} val {float(val_loss(state)):.4f}")


if __name__ == "__main__":
    main()
