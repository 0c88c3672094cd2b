import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, LENGTH, DIM = 16, 14, 48


class Block(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.ln1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(heads, dim, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.tok = nnx.Embed(VOCAB, DIM, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.pos = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, DIM)))
        self.block1 = Block(DIM, 4, rngs)
        self.block2 = Block(DIM, 4, rngs)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.tok(tokens) + self.pos[...]
        x = jnp.swapaxes(x, 0, 1)
        for block in (self.block1, self.block2):
            x = block(x)
        x = jnp.swapaxes(x, 0, 1)
        return self.head(self.norm(x))


def get_batch(rng, n):
    tokens = rng.integers(0, VOCAB, (n, LENGTH))
    return tokens, np.roll(tokens, 5, axis=1)


@nnx.jit
def train_step(model, optimizer, tokens, target):
    def loss_fn(m):
        logits = m(tokens)
        ce = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return ce.mean(), (logits.argmax(-1) == target).mean()

    (loss, acc), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, acc


def main(steps=250, batch=48):
    rng = np.random.default_rng(0)
    model = Encoder(nnx.Rngs(1))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule, weight_decay=1e-3), wrt=nnx.Param)
    for i in range(steps):
        loss, acc = train_step(model, optimizer, *get_batch(rng, batch))
        if i % 40 == 0 or i == steps - 1:
            print(f"{i:4d}  loss {float(loss):.4f}  acc {float(acc):.3f}")


if __name__ == "__main__":
    main()
