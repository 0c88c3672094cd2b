# Adding problem with a GRU: sum the two marked numbers. A small probe predicts the first one for monitoring.
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

LENGTH = 12


class Encoder(nn.Module):
    size: int = 48

    @nn.compact
    def __call__(self, x):
        carry, _ = nn.RNN(nn.GRUCell(self.size), return_carry=True)(x)
        return carry


class Adder(nn.Module):
    @nn.compact
    def __call__(self, x):
        z = Encoder(name="encoder")(x)
        z = jax.lax.stop_gradient(z)  # the probe is for monitoring only
        probe = nn.Dense(1, name="probe")(z)
        total = nn.Dense(1, name="total")(z)
        return total[:, 0], probe[:, 0]


def get_batch(rng, n):
    values = rng.uniform(-1, 1, (n, LENGTH))
    marks = np.zeros((n, LENGTH))
    first = rng.integers(0, LENGTH // 2, n)
    second = rng.integers(LENGTH // 2, LENGTH, n)
    rows = np.arange(n)
    marks[rows, first] = marks[rows, second] = 1
    x = np.stack([values, marks], -1).astype(np.float32)
    a, b = values[rows, first], values[rows, second]
    return x, (a + b).astype(np.float32), a.astype(np.float32)


def compute_loss(apply_fn, params, x, total, first):
    t, p = apply_fn({"params": params}, x)
    main = jnp.mean((t - total) ** 2)
    return main + jnp.mean((p - first) ** 2), main


@jax.jit
def train_step(state, x, total, first):
    grad_fn = jax.value_and_grad(lambda p: compute_loss(state.apply_fn, p, x, total, first), has_aux=True)
    (_, main), grads = grad_fn(state.params)
    return state.apply_gradients(grads=grads), main


def main():
    rng = np.random.default_rng(0)
    model = Adder()
    params = model.init(jax.random.key(0), get_batch(rng, 2)[0])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))
    for step in range(300):
        state, mse = train_step(state, *get_batch(rng, 128))
        if step % 50 == 49:
            print(f"step {step + 1}: sum mse {mse:.4f}")
    _, mse = compute_loss(state.apply_fn, state.params, *get_batch(rng, 2000))
    print(f"test mse {mse:.4f} (always predicting 0 gives 0.667)")


main()
