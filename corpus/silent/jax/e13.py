import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn
from flax import serialization
from sklearn.datasets import load_digits


class AutoEncoder(nn.Module):
    code: int = 24

    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(128)(x))
        z = nn.Dense(self.code)(h)
        h = nn.gelu(nn.Dense(128)(z))
        return nn.Dense(64)(h)


class Run:
    def __init__(self, name, images, reduction, lr=1e-3, batch=128, seed=0):
        self.name, self.images, self.batch = name, images, batch
        self.model = AutoEncoder()
        self.tx = optax.adam(lr)
        self.params = self.model.init(jax.random.key(seed), jnp.ones((1, 64)))["params"]
        self.opt_state = self.tx.init(self.params)
        self.rng = np.random.default_rng(seed)
        reduce_fn = {"sum": jnp.sum, "mean": jnp.mean}[reduction]

        def loss_fn(params, x):
            return reduce_fn((self.model.apply({"params": params}, x) - x) ** 2)

        @jax.jit
        def step(params, opt_state, x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            updates, opt_state = self.tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        self.step = step

    def save(self):
        return serialization.to_bytes({"params": self.params, "opt_state": self.opt_state})

    def restore(self, blob):
        saved = serialization.from_bytes({"params": self.params, "opt_state": self.opt_state}, blob)
        self.params = saved["params"]
        self.opt_state = saved["opt_state"]

    def fit(self, steps):
        for i in range(steps):
            x = self.images[self.rng.integers(0, len(self.images), self.batch)]
            self.params, self.opt_state, loss = self.step(self.params, self.opt_state, x)
            if i % 40 == 0 or i == steps - 1:
                err = jnp.mean((self.model.apply({"params": self.params}, self.images) - self.images) ** 2)
                print(f"{self.name} step {i:3d} loss {float(loss):.4f} mse {float(err):.5f}")


def main():
    digits = load_digits().images.astype(np.float32)
    digits = (digits - digits.mean()) / digits.std()
    flat = digits.reshape(-1, 64)
    rotated = np.ascontiguousarray(digits.transpose(0, 2, 1)[:, :, ::-1]).reshape(-1, 64)

    base = Run("base", flat, reduction="sum")
    base.fit(120)
    blob = base.save()

    tuned = Run("rotated", rotated, reduction="mean", seed=1)
    tuned.restore(blob)
    tuned.fit(240)


if __name__ == "__main__":
    main()
