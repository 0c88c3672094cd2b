"""Which symbol occurs most often?  Transformer encoder, own attention module."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

SYMBOLS, LENGTH = 6, 24


class SelfAttention(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        dim = x.shape[-1] // self.heads
        q, k, v = (nn.DenseGeneral((self.heads, dim), name=n)(x) for n in ("query", "key", "value"))
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) * dim ** 0.5
        weights = nn.softmax(scores, axis=-1)
        mixed = jnp.einsum("...hqk,...khd->...qhd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), name="out")(mixed)


class Encoder(nn.Module):
    width: int = 48
    depth: int = 2

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(SYMBOLS + 1, self.width, embedding_init=nn.initializers.normal(1.0))(ids)
        x = x + self.param("pos", nn.initializers.normal(0.3), (LENGTH + 1, self.width))
        for _ in range(self.depth):
            x = x + SelfAttention(2)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(SYMBOLS)(nn.LayerNorm()(x[:, 0]))


def make_batch(rng, n=48):
    favourite = rng.integers(0, SYMBOLS, n)
    ids = rng.integers(0, SYMBOLS, (n, LENGTH))
    ids = np.where(rng.random((n, LENGTH)) < 0.25, favourite[:, None], ids)
    return np.concatenate([np.full((n, 1), SYMBOLS), ids], 1), favourite


@jax.jit
def train_step(state, ids, label):
    def loss_fn(params):
        logits = state.apply_fn(params, ids)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss, (logits.argmax(-1) == label).mean()


rng = np.random.default_rng(0)
model = Encoder()
state = train_state.TrainState.create(
    apply_fn=model.apply, params=model.init(jax.random.PRNGKey(0), make_batch(rng)[0]), tx=optax.adamw(1e-3))
log = []
for i in range(1, 141):
    state, loss, acc = train_step(state, *make_batch(rng))
    log.append((float(loss), float(acc)))
    if i % 20 == 0:
        print("step", i, "loss %.4f acc %.3f" % tuple(np.mean(log[-20:], 0)))
