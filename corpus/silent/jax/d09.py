from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


class TrainState(train_state.TrainState):
    batch_stats: Any


class SmallConvNet(nn.Module):
    channels: tuple = (16, 32)

    @nn.compact
    def __call__(self, x, train):
        for c in self.channels:
            x = nn.Conv(c, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.relu(x)
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.Dense(64, use_bias=False)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(10)(nn.relu(x))


def create_train_state(key, lr):
    model = SmallConvNet()
    variables = model.init(key, jnp.zeros((1, 8, 8, 1)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.adam(lr),
    )


@jax.jit
def train_step(state, x, y):
    def loss_fn(params):
        logits, mutated = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            x, train=True, mutable=["batch_stats"],
        )
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, mutated

    (loss, mutated), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, loss


@jax.jit
def eval_step(state, x, y):
    logits = state.apply_fn(
        {"params": state.params, "batch_stats": state.batch_stats}, x, train=False
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (logits.argmax(-1) == y).mean()


def main():
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32)
    images = (images - images.mean()) / images.std()
    x_tr, x_va, y_tr, y_va = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    state = create_train_state(jax.random.PRNGKey(0), 2e-3)
    rng = np.random.default_rng(0)
    for epoch in range(6):
        order = rng.permutation(len(x_tr))
        losses = []
        for i in range(0, len(order) - 31, 32):
            idx = order[i:i + 32]
            state, loss = train_step(state, x_tr[idx], y_tr[idx])
            losses.append(float(loss))
        val_loss, val_acc = eval_step(state, x_va, y_va)
        print(f"epoch {epoch}: train {np.mean(losses):.4f}  val {float(val_loss):.4f}  acc {float(val_acc):.3f}")


if __name__ == "__main__":
    main()
