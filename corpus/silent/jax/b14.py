import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler


class TabularNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            y = nn.LayerNorm()(x)
            x = nn.Dense(64)(x) + nn.Dense(64)(nn.gelu(nn.Dense(64)(y)))
        return nn.Dense(1)(x).squeeze(-1)


class Trainer:
    def __init__(self, model, example, warmup=40, total=240):
        self.model = model
        schedule = optax.join_schedules(
            [optax.linear_schedule(1e-6, 2e-3, warmup), optax.cosine_decay_schedule(2e-3, total - warmup)], [warmup])
        self.tx = optax.adamw(schedule, weight_decay=1e-4)
        self.params = model.init(jax.random.key(21), example)["params"]
        self._jit_step = jax.jit(self._step)

    def new_state(self):
        return train_state.TrainState.create(apply_fn=self.model.apply, params=self.params, tx=self.tx)

    @staticmethod
    def _step(state, x, y):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, x)
            return optax.sigmoid_binary_cross_entropy(logits, y).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    def fit(self, x, y, epochs, batch_size):
        rng = np.random.default_rng(21)
        for epoch in range(1, epochs + 1):
            order = rng.permutation(len(x))
            losses = []
            for i in range(0, len(x) - batch_size + 1, batch_size):
                sel = order[i:i + batch_size]
                state, loss = self._jit_step(self.new_state(), x[sel], y[sel])
                self.params = state.params
                losses.append(float(loss))
            if epoch % 5 == 0:
                print(f"epoch {epoch:2d}: loss {np.mean(losses):.4f}")

    def evaluate(self, x, y):
        logits = self.model.apply({"params": self.params}, x)
        return (float(optax.sigmoid_binary_cross_entropy(logits, y).mean()), float(((logits > 0) == (y > 0.5)).mean()))


if __name__ == "__main__":
    X, Y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    X, Y = X[order], Y[order].astype(np.float32)
    X = StandardScaler().fit(X[:450]).transform(X).astype(np.float32)
    trainer = Trainer(TabularNet(), X[:1])
    trainer.fit(X[:450], Y[:450], epochs=30, batch_size=50)
    print("validation loss %.4f accuracy %.3f" % trainer.evaluate(X[450:], Y[450:]))
