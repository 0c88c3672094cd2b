"""Mixed precision ConvNet: activations in bfloat16, parameters and optimizer in float32."""
import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits


class ConvNet(nn.Module):
    dtype: jnp.dtype = jnp.bfloat16

    @nn.compact
    def __call__(self, x):
        x = x.astype(self.dtype)
        for width in (24, 48):
            x = nn.Conv(width, (3, 3), dtype=self.dtype, param_dtype=jnp.float32)(x)
            x = nn.GroupNorm(num_groups=4, dtype=self.dtype, param_dtype=jnp.float32)(x)
            x = nn.relu(x)
            x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(10, dtype=self.dtype, param_dtype=jnp.float32)(x)
        return x.astype(jnp.float32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def train_step(state, images, labels):
    def f(params):
        return cross_entropy(state.apply_fn({"params": params}, images), labels)
    loss, grads = jax.value_and_grad(f)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def eval_step(state, images, labels):
    logits = state.apply_fn({"params": state.params}, images)
    return cross_entropy(logits, labels), (logits.argmax(-1) == labels).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1.5e-3)
    ap.add_argument("--steps", type=int, default=220)
    args = ap.parse_args()
    digits = load_digits()
    images = (digits.images[..., None] / 8.0 - 1.0).astype(np.float32)
    labels = digits.target
    net = ConvNet()
    params = net.init(jax.random.key(0), images[:1])["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adamw(args.lr, weight_decay=1e-3))
    rng = np.random.default_rng(0)
    for step in range(1, args.steps + 1):
        idx = rng.integers(0, 1500, 96)
        state, loss = train_step(state, images[idx], labels[idx])
        if step % 20 == 0:
            print(f"{step:4d}  loss {loss:.4f}")
    loss, acc = eval_step(state, images[1500:], labels[1500:])
    print(f"held-out loss {loss:.4f} acc {acc:.4f}")


if __name__ == "__main__":
    main()
