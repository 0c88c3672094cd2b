"""Sentence encoder with half-precision self-attention (flax linen)."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

VOCAB, LEN, DIM, PAD = 60, 14, 32, 0


def reviews(n, rng):
    lengths = rng.integers(3, LEN + 1, n)
    lengths[rng.random(n) < 0.01] = 0
    tok = rng.integers(1, VOCAB, (n, LEN))
    tok[np.arange(LEN)[None] >= lengths[:, None]] = PAD
    label = ((tok > VOCAB // 2).sum(1) > lengths / 2).astype(np.int32)
    return tok, label


class SelfAttention(nn.Module):
    heads: int = 2

    @nn.compact
    def __call__(self, x, mask):
        d = x.shape[-1] // self.heads
        qkv = nn.DenseGeneral((3, self.heads, d), dtype=jnp.float16)(x)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        score = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d).astype(np.float16)
        bias = jnp.where(mask, 0.0, -1e10).astype(score.dtype)
        att = nn.softmax(score + bias[:, None, None, :], axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", att, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype=jnp.float16)(out)


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tok):
        mask = tok != PAD
        x = nn.Embed(VOCAB, DIM)(tok) + self.param("pos", nn.initializers.normal(0.02), (LEN, DIM))
        x = x + SelfAttention()(nn.LayerNorm()(x).astype(jnp.float16), mask)
        x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x))))
        w = mask[..., None].astype(jnp.float32)
        pooled = (x * w).sum(1) / jnp.maximum(w.sum(1), 1.0)
        return nn.Dense(2)(pooled)


@jax.jit
def train_step(state, tok, label):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, tok)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean(), logits

    (loss, logits), g = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=g), loss, jnp.mean(logits.argmax(-1) == label)


rng = np.random.default_rng(6)
tok, label = reviews(1200, rng)
net = Encoder()
state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.PRNGKey(0), tok[:2])["params"],
                          tx=optax.adamw(1e-3, weight_decay=1e-2))
for i in range(1200 // 24):
    state, loss, acc = train_step(state, tok[24 * i:24 * i + 24], label[24 * i:24 * i + 24])
    if i % 3 == 0:
        print(f"{i:3d} loss {loss:.4f} acc {acc:.2f}")
