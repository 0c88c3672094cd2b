import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

CONFIG = {"epochs": 8, "batch_size": 40, "lr": 0.05, "momentum": 0.9, "seed": 0}


class ConvNet(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.fc1 = nnx.Linear(2 * 2 * 32, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.fc2(nnx.relu(self.fc1(x)))


def make_optimizer(model, cfg):
    schedule = optax.cosine_decay_schedule(init_value=cfg["lr"], decay_steps=cfg["epochs"])
    tx = optax.sgd(schedule, momentum=cfg["momentum"], nesterov=True)
    return nnx.Optimizer(model, tx, wrt=nnx.Param)


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model, x, y):
    return (model(x).argmax(-1) == y).mean()


def epoch_batches(x, y, batch_size, rng):
    order = rng.permutation(len(x))
    for start in range(0, len(x) - batch_size + 1, batch_size):
        sel = order[start:start + batch_size]
        yield x[sel], y[sel]


def main(cfg):
    digits = load_digits()
    images = (digits.images[..., None] / 16.0).astype(np.float32)
    x_tr, x_te, y_tr, y_te = train_test_split(
        images, digits.target, test_size=0.25, random_state=cfg["seed"])
    model = ConvNet(nnx.Rngs(cfg["seed"]))
    optimizer = make_optimizer(model, cfg)
    rng = np.random.default_rng(cfg["seed"])
    for epoch in range(cfg["epochs"]):
        losses = [float(train_step(model, optimizer, bx, by))
                  for bx, by in epoch_batches(x_tr, y_tr, cfg["batch_size"], rng)]
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}  acc {float(eval_step(model, x_te, y_te)):.3f}")


if __name__ == "__main__":
    main(CONFIG)
