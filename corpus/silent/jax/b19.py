import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.linear1 = nnx.Linear(128, 64, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.conv1(x)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.linear1(x.reshape(x.shape[0], -1)))
        return nnx.softmax(self.linear2(x))


def loss_fn(model: CNN, batch):
    out = model(batch["image"])
    loss = optax.softmax_cross_entropy(logits=out, labels=jax.nn.one_hot(batch["label"], 10)).mean()
    return loss, out


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, out), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=out, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, out = loss_fn(model, batch)
    metrics.update(loss=loss, logits=out, labels=batch["label"])


def loader(images, labels, batch_size, rng):
    order = rng.permutation(len(images))
    for i in range(len(images) // batch_size):
        sel = order[i * batch_size:(i + 1) * batch_size]
        yield {"image": images[sel], "label": labels[sel].astype(np.int32)}


data = load_digits()
images = (data.images[..., None] / 16.0).astype(np.float32)
labels = data.target
rng = np.random.default_rng(0)

model = CNN(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

for epoch in range(10):
    for batch in loader(images[:1500], labels[:1500], 60, rng):
        train_step(model, optimizer, metrics, batch)
    m = metrics.compute()
    print(f"[train] epoch {epoch}, loss {m['loss']:.4f}, accuracy {m['accuracy']:.4f}")
    metrics.reset()

for batch in loader(images[1500:], labels[1500:], 99, rng):
    eval_step(model, metrics, batch)
m = metrics.compute()
print(f"[test] loss {m['loss']:.4f}, accuracy {m['accuracy']:.4f}")
