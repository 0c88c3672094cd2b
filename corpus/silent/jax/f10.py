import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Block(nnx.Module):
    def __init__(self, cin, cout, stride, rngs):
        self.conv = nnx.Conv(cin, cout, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.bn = nnx.BatchNorm(cout, momentum=0.999, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.bn(self.conv(x)))


class SmallNet(nnx.Module):
    def __init__(self, rngs):
        self.b1 = Block(1, 16, 1, rngs)
        self.b2 = Block(16, 24, 2, rngs)
        self.b3 = Block(24, 32, 1, rngs)
        self.b4 = Block(32, 48, 2, rngs)
        self.fc = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x):
        x = self.b4(self.b3(self.b2(self.b1(x))))
        return self.fc(x.mean(axis=(1, 2)))


def objective(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


@nnx.jit
def train_step(model, optimizer, x, y):
    (loss, _), grads = nnx.value_and_grad(objective, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model, x, y):
    loss, logits = objective(model, x, y)
    return loss, jnp.mean(logits.argmax(-1) == y)


class Runner:
    def __init__(self, batch=64, lr=2e-3):
        d = load_digits()
        images = d.images[..., None].astype(np.float32)
        self.train = images[:1400], d.target[:1400]
        self.val = images[1400:], d.target[1400:]
        self.model = SmallNet(nnx.Rngs(0))
        self.opt = nnx.Optimizer(self.model, optax.adam(lr), wrt=nnx.Param)
        self.batch = batch
        self.rng = np.random.default_rng(0)

    def run_epoch(self):
        self.model.train()
        x, y = self.train
        order = self.rng.permutation(len(x))
        total = []
        for s in range(0, len(x) - self.batch + 1, self.batch):
            j = order[s:s + self.batch]
            total.append(train_step(self.model, self.opt, x[j], y[j]))
        return float(jnp.stack(total).mean())

    def validate(self):
        self.model.eval()
        loss, acc = eval_step(self.model, *self.val)
        return float(loss), float(acc)

    def fit(self, epochs):
        for e in range(epochs):
            tr = self.run_epoch()
            vl, va = self.validate()
            print(f"epoch {e} train {tr:.4f} val {vl:.4f} val acc {va:.3f}")


if __name__ == "__main__":
    Runner().fit(5)
