import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class Autoencoder(nn.Module):
    latent: int = 16
    dtype: jnp.dtype = jnp.float16

    @nn.compact
    def __call__(self, x):
        h = nn.tanh(nn.Dense(128, dtype=self.dtype)(x))
        z = nn.Dense(self.latent, dtype=self.dtype)(h)
        h = nn.tanh(nn.Dense(128, dtype=self.dtype)(z))
        return nn.sigmoid(nn.Dense(x.shape[-1], dtype=self.dtype)(h))


def class_balanced_weights(y):
    counts = np.bincount(y)
    w = 1.0 / counts[y]
    return (w / w.sum()).astype(np.float32)


def batches(x, w, size, epochs, seed=0):
    rng = np.random.default_rng(seed)
    for epoch in range(epochs):
        order = rng.permutation(len(x))
        for i in range(0, len(order) - size + 1, size):
            sel = order[i:i + size]
            yield epoch, x[sel], w[sel]


@jax.jit
def train_step(state, x, w):
    def loss_fn(params):
        recon = state.apply_fn(params, x)
        err = jnp.mean((recon.astype(jnp.float32) - x) ** 2, axis=-1)
        return jnp.mean(w * err), err.mean()

    (loss, mse), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, mse


def main():
    data = load_digits()
    x = (data.data / 16.0).astype(np.float32)
    train, test = x[:1500], x[1500:]
    weights = class_balanced_weights(data.target[:1500])
    model = Autoencoder()
    params = model.init(jax.random.PRNGKey(0), x[:2])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(2e-3))
    last = -1
    for epoch, bx, bw in batches(train, weights, 250, epochs=50):
        state, loss, mse = train_step(state, bx, bw)
        if epoch != last and epoch % 5 == 0:
            print(f"epoch {epoch:2d}  weighted loss {float(loss):.3e}  mse {float(mse):.5f}")
            last = epoch
    recon = state.apply_fn(state.params, test).astype(jnp.float32)
    print("test mse", float(jnp.mean((recon - test) ** 2)))
    print("mean-image mse", float(np.mean((test - train.mean(0)) ** 2)))


if __name__ == "__main__":
    main()
