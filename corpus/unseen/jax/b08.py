"""Character-level LM on a synthetic grammar, with a length curriculum."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

VOCAB = 12
MAX_LEN = 32


class Block(nn.Module):
    dim: int
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        B, T, _ = h.shape
        q, k, v = jnp.split(nn.Dense(3 * self.dim, use_bias=False)(h), 3, axis=-1)
        q, k, v = (t.reshape(B, T, self.heads, -1) for t in (q, k, v))
        a = nn.dot_product_attention(q, k, v, mask=mask)
        x = x + nn.Dense(self.dim)(a.reshape(B, T, self.dim))
        h = nn.LayerNorm()(x)
        return x + nn.Dense(self.dim)(nn.gelu(nn.Dense(2 * self.dim)(h)))


class LM(nn.Module):
    dim: int = 32
    depth: int = 1

    @nn.compact
    def __call__(self, tokens):
        T = tokens.shape[1]
        x = nn.Embed(VOCAB, self.dim, name="tok")(tokens)
        x = x + nn.Embed(MAX_LEN, self.dim, name="pos")(jnp.arange(T))[None]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = Block(self.dim, 4)(x, mask)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def sample_batch(rng, batch, length):
    start = rng.integers(0, VOCAB, size=(batch, 1))
    stride = rng.integers(1, 4, size=(batch, 1))
    seq = (start + stride * np.arange(length + 1)) % VOCAB
    flip = rng.random(seq.shape) < 0.03
    seq = np.where(flip, rng.integers(0, VOCAB, size=seq.shape), seq)
    return seq[:, :-1].astype(np.int32), seq[:, 1:].astype(np.int32)


@jax.jit
def train_step(state, x, y):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main():
    rng = np.random.default_rng(1)
    model = LM()
    variables = jax.jit(model.init)(jax.random.PRNGKey(0), jnp.zeros((1, 8), jnp.int32))
    state = TrainState.create(apply_fn=model.apply, params=variables["params"],
                              tx=optax.adamw(3e-3))
    curriculum = [16] * 20 + [48] * 8
    for i, length in enumerate(curriculum):
        x, y = sample_batch(rng, 16, length)
        state, loss = train_step(state, x, y)
        if i % 5 == 0:
            print(f"step {i} len {length} loss {loss:.4f}")


if __name__ == "__main__":
    main()
