import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Cnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 12, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(12, 16, (3, 3), strides=2, rngs=rngs)
        self.fc1 = nnx.Linear(4 * 4 * 16, 48, rngs=rngs)
        self.fc2 = nnx.Linear(48, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv1(x))
        x = nnx.relu(self.conv2(x))
        x = nnx.relu(self.fc1(x.reshape(x.shape[0], -1)))
        return self.fc2(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def stream(steps, size=64):
    d = load_digits()
    images = (d.images[..., None] / 16.0).astype("float32")
    rng = np.random.default_rng(2)
    for _ in range(steps):
        i = rng.integers(0, len(images), size)
        yield {"image": jnp.asarray(images[i]), "label": jnp.asarray(d.target[i])}


STEPS = 240
model = Cnn(nnx.Rngs(0))
lr = optax.warmup_cosine_decay_schedule(init_value=0.01, peak_value=1.5, warmup_steps=100, decay_steps=STEPS)
optimizer = nnx.Optimizer(model, optax.sgd(lr, momentum=0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

for step, batch in enumerate(stream(STEPS), start=1):
    train_step(model, optimizer, metrics, batch)
    if step % 20 == 0:
        out = metrics.compute()
        metrics.reset()
        print(f"[{step:3d}] loss={float(out['loss']):.4f} acc={float(out['accuracy']):.3f}")
