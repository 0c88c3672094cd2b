"""Residual-free conv net with batch norm on the 8x8 digits."""
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class ConvBlock(nn.Module):
    features: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.features, (3, 3), strides=self.strides, use_bias=False,
                    kernel_init=nn.initializers.normal(0.05))(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = ConvBlock(12)(x, train)
        x = ConvBlock(12)(x, train)
        x = ConvBlock(24, 2)(x, train)
        x = ConvBlock(24)(x, train)
        x = ConvBlock(24, 2)(x, train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(10)(x)


class State(train_state.TrainState):
    batch_stats: Any = None


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        logits, mut = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, x,
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), mut

    (loss, mut), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(batch_stats=mut["batch_stats"]), loss


def main():
    d = load_digits()
    xs = (d.images / 16.0).astype(np.float32)[..., None]
    xtr, xte, ytr, yte = train_test_split(xs, d.target, test_size=300, random_state=0)
    net = Net()
    variables = net.init(jax.random.PRNGKey(0), xtr[:2], train=False)
    state = State.create(apply_fn=net.apply, params=variables["params"],
                         batch_stats=variables["batch_stats"], tx=optax.sgd(0.1, momentum=0.9))
    rng = np.random.default_rng(0)
    for step in range(120):
        idx = rng.integers(0, len(xtr), 64)
        state, loss = train_step(state, xtr[idx], ytr[idx])
        if step % 20 == 0 or step == 119:
            print(f"step {step} loss {loss:.4f}")
    logits = net.apply({"params": state.params, "batch_stats": state.batch_stats}, xte)
    print("test acc", float((logits.argmax(-1) == yte).mean()))


if __name__ == "__main__":
    main()
