import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

EPOCHS, BATCH, DIM = 10, 64, 48


class EncoderBlock(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=heads, in_features=dim, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class RowTransformer(nnx.Module):
    """Every image row is a token."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(8, DIM, rngs=rngs)
        self.pos = nnx.Param(0.02 * jax.random.normal(rngs.params(), (8, DIM)))
        self.block1 = EncoderBlock(DIM, 4, rngs)
        self.block2 = EncoderBlock(DIM, 4, rngs)
        self.head = nnx.Linear(DIM, 10, rngs=rngs)

    def __call__(self, x):
        h = self.embed(x) + self.pos[...]
        h = self.block2(self.block1(h))
        return self.head(h.mean(axis=1))


def loss_fn(model, x, y):
    logits = model(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


@nnx.jit
def train_step(model, optimizer, x, y):
    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, y)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, x, y):
    return (model(x).argmax(-1) == y).mean()


digits = load_digits()
X = (digits.images / 16.0).astype(np.float32)
Y = digits.target
perm = np.random.default_rng(0).permutation(len(X))
train, test = perm[:1500], perm[1500:]
steps_per_epoch = len(train) // BATCH

model = RowTransformer(nnx.Rngs(0))
schedule = optax.warmup_cosine_decay_schedule(
    init_value=0.0, peak_value=3e-3, warmup_steps=2,
    decay_steps=EPOCHS, end_value=0.0)
optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-2), wrt=nnx.Param)

rng = np.random.default_rng(1)
for epoch in range(EPOCHS):
    rng.shuffle(train)
    losses = []
    for s in range(steps_per_epoch):
        b = train[s * BATCH:(s + 1) * BATCH]
        losses.append(train_step(model, optimizer, X[b], Y[b]))
    print(f"epoch {epoch + 1}: loss {np.mean(jnp.stack(losses)):.4f}  test acc {accuracy(model, X[test], Y[test]):.3f}")
