from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax


def arm_dataset(n, seed):
    rng = np.random.default_rng(seed)
    angles = rng.uniform(-np.pi, np.pi, (n, 3))
    cum = np.cumsum(angles, axis=1)
    lengths = np.array([1.0, 0.7, 0.4])
    xy = np.stack([(np.cos(cum) * lengths).sum(1), (np.sin(cum) * lengths).sum(1)], axis=1)
    feats = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return feats.astype(np.float32), xy.astype(np.float32)


class Trainer:
    def __init__(self, sizes, lr, seed=0):
        self.tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(lr))
        self.params = self.init(jax.random.PRNGKey(seed), sizes)
        self.opt_state = self.tx.init(self.params)

    @staticmethod
    def init(key, sizes):
        out = []
        for m, n in zip(sizes[:-1], sizes[1:]):
            key, k = jax.random.split(key)
            limit = np.sqrt(6.0 / (m + n))
            out.append((jax.random.uniform(k, (m, n), minval=-limit, maxval=limit), jnp.zeros(n)))
        return out

    @staticmethod
    def forward(params, x):
        for w, b in params[:-1]:
            x = jnp.tanh(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    def loss(self, params, x, y):
        return jnp.mean(jnp.sum((self.forward(params, x) - y) ** 2, axis=-1))

    @partial(jax.jit, static_argnums=0)
    def step(self, opt_state, x, y):
        loss, grads = jax.value_and_grad(self.loss)(self.params, x, y)
        updates, opt_state = self.tx.update(grads, opt_state)
        return updates, opt_state, loss

    def fit(self, x, y, steps, batch_size, log_every=40):
        rng = np.random.default_rng(1)
        for i in range(steps):
            idx = rng.integers(0, len(x), batch_size)
            updates, self.opt_state, loss = self.step(self.opt_state, x[idx], y[idx])
            self.params = optax.apply_updates(self.params, updates)
            if i % log_every == 0:
                print(f"step {i:4d}  batch loss {float(loss):.4f}")

    def evaluate(self, x, y):
        return float(self.loss(self.params, x, y))


def main():
    x_train, y_train = arm_dataset(4000, 0)
    x_test, y_test = arm_dataset(500, 1)
    trainer = Trainer([6, 64, 64, 2], lr=3e-3)
    print("test loss before:", trainer.evaluate(x_test, y_test))
    trainer.fit(x_train, y_train, steps=400, batch_size=128)
    print("test loss after:", trainer.evaluate(x_test, y_test))


if __name__ == "__main__":
    main()
