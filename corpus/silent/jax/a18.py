"""ViT in miniature: sixteen 2x2 patches of a digit, flax nnx."""
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Block(nnx.Module):
    def __init__(self, dim, heads, rngs):
        self.norm1 = nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(num_heads=heads, in_features=dim, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 2 * dim, rngs=rngs)
        self.down = nnx.Linear(2 * dim, dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class TinyViT(nnx.Module):
    def __init__(self, dim=32, heads=4, rngs=None):
        self.patch = nnx.Linear(4, dim, rngs=rngs)
        self.pos = nnx.Param(0.1 * nnx.initializers.normal(1.0)(rngs.params(), (16, dim)))
        self.block1 = Block(dim, heads, rngs)
        self.block2 = Block(dim, heads, rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, 10, rngs=rngs)

    def __call__(self, patches):
        x = self.patch(patches) + self.pos[...]
        x = self.block2(self.block1(x))
        return self.head(self.norm(x).mean(axis=1))


def patchify(images):
    n = len(images)
    return images.reshape(n, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(n, 16, 4)


@nnx.jit
def step(model, opt, x, y):
    def objective(m):
        return optax.softmax_cross_entropy_with_integer_labels(m(x), y).mean()

    value, grad = nnx.value_and_grad(objective)(model)
    opt.update(model, grad)
    return value


digits = load_digits()
x = patchify(digits.images / 8.0 - 1.0).astype("float32")
y = digits.target
model = TinyViT(rngs=nnx.Rngs(0))
opt = nnx.Optimizer(model, optax.adam(2e-3, b1=0.9, b2=0.999, eps=1.0), wrt=nnx.Param)
rng = np.random.default_rng(0)
for it in range(1, 151):
    pick = rng.integers(0, 1500, 32)
    value = step(model, opt, x[pick], y[pick])
    if it % 15 == 0:
        print("iteration", it, "loss", round(float(value), 4))
acc = np.mean(np.asarray(model(jnp.asarray(x[1500:]))).argmax(1) == y[1500:])
print("accuracy", round(float(acc), 3))
