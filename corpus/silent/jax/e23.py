import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state


class Forecaster(nn.Module):
    hidden: int = 32

    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)
        return nn.Dense(1)(h)[..., 0]


def waves(rng, n, length):
    t = np.arange(length + 1)
    freq = rng.uniform(0.15, 0.5, (n, 1))
    phase = rng.uniform(0, 2 * np.pi, (n, 1))
    series = np.sin(freq * t + phase) + 0.5 * np.sin(2 * freq * t + 2 * phase)
    series = series.astype(np.float32)
    return series[:, :-1, None], series[:, 1:]


def create_state(key, lr, clip_norm, length):
    model = Forecaster()
    params = model.init(key, jnp.zeros((1, length, 1)))["params"]
    tx = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.sgd(lr, momentum=0.9),
    )
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        pred = state.apply_fn({"params": params}, x)
        return jnp.sum((pred - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss, optax.global_norm(grads)


def main(steps=300, batch=64, length=40):
    rng = np.random.default_rng(3)
    state = create_state(jax.random.key(0), lr=1e-4, clip_norm=1.0, length=length)
    for i in range(steps):
        x, y = waves(rng, batch, length)
        state, loss, norm = train_step(state, x, y)
        if i % 30 == 0 or i == steps - 1:
            print(f"it {i:4d} loss {float(loss):9.2f} per point {float(loss) / y.size:.4f} |g| {float(norm):.1f}")


if __name__ == "__main__":
    main()
