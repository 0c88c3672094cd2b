"""Tiny semantic segmentation with a void class (annotator's unlabelled border)."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

NUM_CLASSES = 4
VOID = 255
SIZE = 16


def synth_images(n, rng):
    imgs = 0.3 * rng.standard_normal((n, SIZE, SIZE, 3)).astype(np.float32)
    labels = np.zeros((n, SIZE, SIZE), np.int32)
    for i in range(n):
        c = rng.integers(1, NUM_CLASSES)
        r0, c0 = rng.integers(2, 7, 2)
        labels[i, r0:r0 + 6, c0:c0 + 6] = c
        imgs[i, r0:r0 + 6, c0:c0 + 6, c - 1] += 1.5
        if i >= n // 2:
            labels[i, r0, c0:c0 + 6] = VOID
    weights = (labels != VOID).astype(np.float32)
    return imgs, labels, weights


class ConvNet(nn.Module):
    width: int = 12

    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Conv(self.width, (3, 3))(x))
        h = h + nn.relu(nn.Conv(self.width, (3, 3))(h))
        h = nn.LayerNorm()(h)
        return nn.Conv(NUM_CLASSES, (1, 1))(h)


def segmentation_loss(logits, labels, weights):
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(ce * weights) / jnp.maximum(weights.sum(), 1.0)


@jax.jit
def train_step(state, x, y, w):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, x)
        return segmentation_loss(logits, y, w), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    acc = jnp.sum((jnp.argmax(logits, -1) == y) * w) / w.sum()
    return state.apply_gradients(grads=grads), loss, acc


def main():
    rng = np.random.default_rng(11)
    x, y, w = synth_images(96, rng)
    model = ConvNet()
    params = model.init(jax.random.PRNGKey(0), x[:1])["params"]
    sched = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, 60)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(sched))
    bs = 8
    for epoch in range(4):
        for b in range(len(x) // bs):
            sl = slice(b * bs, (b + 1) * bs)
            state, loss, acc = train_step(state, x[sl], y[sl], w[sl])
            if b % 3 == 0:
                print(f"epoch {epoch} batch {b} loss {loss:.4f} pixel-acc {acc:.3f}")


if __name__ == "__main__":
    main()
