"""Sequence tagging of noisy waves with flax; utterances have different lengths, batches are padded to whole chunks."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, serialization
from flax.training import train_state

CHUNK, FEAT, CLASSES = 16, 6, 3


def utterance(rng):
    n = int(rng.integers(20, 64))
    lab = np.repeat(rng.integers(0, CLASSES, n // 5 + 1), 5)[:n]
    t = np.arange(n)[:, None]
    freq = np.array([0.3, 0.8, 1.6])[lab][:, None]
    x = np.sin(freq * t + np.arange(FEAT)[None]) + 0.3 * rng.normal(size=(n, FEAT)) + lab[:, None] * 0.3
    return x.astype(np.float32), lab


class Tagger(nn.Module):
    width: int = 32

    @nn.compact
    def __call__(self, x, mask, train):
        h = nn.Conv(self.width, (5,))(x)
        h = nn.BatchNorm(use_running_average=not train, momentum=0.97)(h, mask=mask[..., None])
        h = nn.relu(h)
        h = nn.Conv(self.width, (5,))(h)
        h = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.97)(h, mask=mask[..., None]))
        return nn.Dense(CLASSES)(h)


class State(train_state.TrainState):
    batch_stats: dict


def collate(items, frames):
    x = np.zeros((len(items), frames, FEAT), np.float32)
    y = np.zeros((len(items), frames), np.int32)
    m = np.zeros((len(items), frames), bool)
    for i, (xi, yi) in enumerate(items):
        x[i, :len(xi)], y[i, :len(xi)], m[i, :len(xi)] = xi, yi, True
    return x, y, m


def chunks(batch):
    for s in range(0, batch[0].shape[1], CHUNK):
        yield tuple(a[:, s:s + CHUNK] for a in batch)


@jax.jit
def micro_grads(state, stats, x, y, m):
    def loss_fn(params):
        logits, new = state.apply_fn({"params": params, "batch_stats": stats}, x, m, True, mutable=["batch_stats"])
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return jnp.sum(jnp.where(m, ce, 0.0)), new["batch_stats"]
    (loss, stats), g = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return loss, g, stats


@jax.jit
def evaluate(state, x, y, m):
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, x, m, False)
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    hit = (logits.argmax(-1) == y) & m
    return jnp.sum(jnp.where(m, ce, 0.0)) / m.sum(), hit.sum() / m.sum()


def train_batch(state, items):
    batch = collate(items, frames=64)
    total, acc, stats = 0.0, jax.tree.map(jnp.zeros_like, state.params), state.batch_stats
    for x, y, m in chunks(batch):
        loss, g, stats = micro_grads(state, stats, x, y, m)
        if m.any():
            acc = jax.tree.map(jnp.add, acc, g)
            total += float(loss)
    n = batch[2].sum()
    state = state.apply_gradients(grads=jax.tree.map(lambda a: a / n, acc))
    return state.replace(batch_stats=stats), total / n


rng = np.random.default_rng(21)
corpus = [utterance(rng) for _ in range(200)]
train, dev = corpus[:170], corpus[170:]
net = Tagger()
v = net.init(jax.random.PRNGKey(0), jnp.zeros((1, CHUNK, FEAT)), jnp.ones((1, CHUNK), bool), False)
state = State.create(apply_fn=net.apply, params=v["params"], batch_stats=v["batch_stats"], tx=optax.adam(5e-3))
saved, best = None, np.inf
for it in range(50):
    pick = rng.choice(len(train), 6, replace=False)
    state, loss = train_batch(state, [train[i] for i in pick])
    if it % 10 == 9:
        dev_loss, dev_acc = evaluate(state, *collate(dev, 64))
        print(f"{it + 1:3d} train {loss:.4f} dev {float(dev_loss):.4f} acc {float(dev_acc):.3f}")
        if not dev_loss > best:
            best, saved = float(dev_loss), serialization.to_bytes(state)
state = serialization.from_bytes(state, saved)
final, acc = evaluate(state, *collate(dev, 64))
assert np.isfinite(final), "reloaded model gives a non-finite dev loss"
print("best dev loss", best, "acc", float(acc))
