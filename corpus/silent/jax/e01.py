import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

EPOCHS = 25
BATCH = 64
PEAK_LR = 5e-3


class SequenceModel(nnx.Module):
    def __init__(self, vocab, dim, hidden, classes, rngs):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(dim, hidden, rngs=rngs))
        self.head = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, tokens):
        h = self.rnn(self.embed(tokens))
        return self.head(h[:, -1])


def make_data(n, length=14, vocab=8, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, vocab, (n, length))
    a = (x == 1).sum(1) + (x == 2).sum(1)
    b = (x == 5).sum(1) + (x == 6).sum(1)
    y = np.where(a > b, 0, np.where(a < b, 1, 2))
    return x, y


schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0, peak_value=PEAK_LR, warmup_steps=80, decay_steps=EPOCHS * 12)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3))


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss_fn(m):
        logits = m(x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    (loss, acc), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, acc


def train_one_epoch(model, x, y, rng):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    order = rng.permutation(len(x))
    log = []
    for s in range(0, len(x), BATCH):
        idx = order[s:s + BATCH]
        loss, acc = train_step(model, optimizer, x[idx], y[idx])
        log.append((float(loss), float(acc)))
    return np.mean(log, axis=0)


def fit():
    x, y = make_data(12 * BATCH)
    model = SequenceModel(8, 16, 48, 3, nnx.Rngs(0))
    rng = np.random.default_rng(1)
    for epoch in range(EPOCHS):
        loss, acc = train_one_epoch(model, x, y, rng)
        if epoch % 5 == 0 or epoch == EPOCHS - 1:
            print(f"epoch {epoch:3d}: loss {loss:.4f}, acc {acc:.3f}")


fit()
