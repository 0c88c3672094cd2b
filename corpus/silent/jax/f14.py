import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Residual(nnx.Module):
    def __init__(self, width, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, width, rngs=rngs)
        self.down = nnx.Linear(width, width, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class DeepNet(nnx.Module):
    def __init__(self, depth, width, rngs):
        self.stem = nnx.Linear(64, width, rngs=rngs)
        self.blocks = nnx.List([Residual(width, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))


def loss_fn(model, x, y):
    logits = model(x)
    targets = optax.smooth_labels(jax.nn.one_hot(y, 10), 0.05)
    return optax.softmax_cross_entropy(logits, targets).mean()


@nnx.jit
def train_step(model, opt, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    opt.update(model, grads)
    return loss


def main(steps=240, depth=12, width=64):
    d = load_digits()
    x = ((d.data - 4.9) / 6.0).astype(np.float32)
    y = d.target
    model = DeepNet(depth, width, nnx.Rngs(2))
    sched = optax.join_schedules(
        [optax.linear_schedule(0.0, 2e-3, 50), optax.cosine_decay_schedule(2e-3, steps - 50)], [50])
    opt = nnx.Optimizer(model, optax.adamw(sched, weight_decay=0.01), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    for it in range(steps):
        j = rng.integers(0, 1500, 128)
        loss = train_step(model, opt, jnp.asarray(x[j]), jnp.asarray(y[j]))
        if it % 30 == 0 or it == steps - 1:
            print(f"[{it:3d}] lr {float(sched(it)):.2e} loss {float(loss):.4f}")
    acc = float(jnp.mean(model(jnp.asarray(x[1500:])).argmax(-1) == y[1500:]))
    print("held-out accuracy", round(acc, 3))


if __name__ == "__main__":
    main()
