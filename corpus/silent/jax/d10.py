from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


@dataclass
class Args:
    dim: int = 64
    heads: int = 4
    depth: int = 2
    lr: float = 1e-4
    batch_size: int = 64
    steps: int = 400
    dtype: jnp.dtype = jnp.bfloat16


class EncoderBlock(nnx.Module):
    def __init__(self, a: Args, rngs: nnx.Rngs):
        kw = dict(dtype=a.dtype, param_dtype=a.dtype, rngs=rngs)
        self.ln1 = nnx.LayerNorm(a.dim, **kw)
        self.attn = nnx.MultiHeadAttention(a.heads, a.dim, decode=False, **kw)
        self.ln2 = nnx.LayerNorm(a.dim, **kw)
        self.up = nnx.Linear(a.dim, 4 * a.dim, **kw)
        self.down = nnx.Linear(4 * a.dim, a.dim, **kw)

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class RowTransformer(nnx.Module):
    def __init__(self, a: Args, rngs: nnx.Rngs):
        kw = dict(dtype=a.dtype, param_dtype=a.dtype, rngs=rngs)
        self.embed = nnx.Linear(8, a.dim, **kw)
        pos = jax.random.normal(rngs.params(), (8, a.dim)) * 0.3
        self.pos = nnx.Param(pos.astype(a.dtype))
        self.blocks = nnx.List([EncoderBlock(a, rngs) for _ in range(a.depth)])
        self.norm = nnx.LayerNorm(a.dim, **kw)
        self.head = nnx.Linear(a.dim, 10, **kw)

    def __call__(self, x):
        x = self.embed(x) + self.pos[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1)).astype(jnp.float32)


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x, y)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def evaluate(model, x, y):
    return (model(x).argmax(-1) == y).mean()


def main():
    args = Args()
    digits = load_digits()
    x = ((digits.images - 5.0) / 6.0).astype(np.float32)
    y = digits.target
    rng = np.random.default_rng(0)
    order = rng.permutation(len(x))
    tr, te = order[:1400], order[1400:]
    model = RowTransformer(args, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(args.lr), wrt=nnx.Param)
    for step in range(args.steps):
        b = rng.choice(tr, args.batch_size, replace=False)
        loss = train_step(model, optimizer, x[b], y[b])
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step:3d}  loss {float(loss):.4f}")
    print("test accuracy", float(evaluate(model, x[te], y[te])))


if __name__ == "__main__":
    main()
