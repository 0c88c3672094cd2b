import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

# small RealNVP density model on 8x8 digits

ALPHA = 0.055
DIM = 64


class Coupling(nnx.Module):
    def __init__(self, mask, rngs):
        self.mask = nnx.Variable(mask)
        self.l1 = nnx.Linear(DIM, 48, rngs=rngs)
        self.l2 = nnx.Linear(48, 2 * DIM, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, z):
        m = self.mask[...]
        s, t = jnp.split(self.l2(nnx.tanh(self.l1(z * m))), 2, axis=-1)
        s = jnp.tanh(s) * (1 - m)
        t = t * (1 - m)
        return z * jnp.exp(s) + t, s.sum(-1)


class RealNVP(nnx.Module):
    def __init__(self, n_layers, rngs):
        checker = jnp.asarray(np.indices((8, 8)).sum(0).reshape(-1) % 2, jnp.float32)
        self.layers = nnx.List([Coupling(checker if i % 2 else 1 - checker, rngs) for i in range(n_layers)])

    def log_prob(self, z):
        total = 0.0
        for layer in self.layers:
            z, ld = layer(z)
            total = total + ld
        return total - 0.5 * jnp.sum(z ** 2 + jnp.log(2 * jnp.pi), -1)


def dequantize(counts, key):
    noise = jax.random.uniform(key, counts.shape)
    return (counts + noise) / 16.0


def to_logits(x):
    x = ALPHA + (1 - 2 * ALPHA) * x
    z = jnp.log(x) - jnp.log1p(-x)
    logdet = -jnp.log(x) - jnp.log1p(-x) + jnp.log(1 - 2 * ALPHA)
    return z, logdet.sum(-1)


@nnx.jit
def train_step(model, optimizer, counts, key):
    def loss_fn(m):
        z, ld = to_logits(dequantize(counts, key))
        return -jnp.mean(m.log_prob(z) + ld) / (DIM * jnp.log(2.0))
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


data = load_digits()
images = data.data[data.target == 7].astype(np.float32)
print("images:", images.shape, "range", images.min(), images.max())

model = RealNVP(4, nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
key = jax.random.PRNGKey(9)
for step in range(30):
    key, sub = jax.random.split(key)
    pick = (np.arange(8) + 8 * step) % len(images)
    loss = train_step(model, optimizer, images[pick], sub)
    if step % 2 == 0:
        print(f"step {step:2d} bits/dim {float(loss):.4f}")
