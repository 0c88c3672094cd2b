"""Decoder-only LM, tied input/output embedding, label smoothing 0.1, bfloat16 compute / float32 params."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

VOCAB, T, D = 20, 16, 48


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, dtype=jnp.bfloat16)(h, h, mask=mask)
        h = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        return x + nn.Dense(D, dtype=jnp.bfloat16)(nn.gelu(nn.Dense(2 * D, dtype=jnp.bfloat16)(h)))


class LM(nn.Module):
    @nn.compact
    def __call__(self, tok):
        emb = nn.Embed(VOCAB, D, dtype=jnp.bfloat16, embedding_init=nn.initializers.normal(0.15))
        pos = self.param("pos", nn.initializers.normal(0.02), (T, D))
        x = emb(tok) + pos[: tok.shape[1]].astype(jnp.bfloat16)
        mask = nn.make_causal_mask(tok)
        for _ in range(2):
            x = Block()(x, mask)
        x = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        return emb.attend(x).astype(jnp.float32)


def sequences(rng, n):
    """x[t+1] = x[t] + step (mod VOCAB), the step differs per sequence"""
    start = rng.integers(0, VOCAB, (n, 1))
    inc = rng.integers(1, 4, (n, 1))
    return (start + inc * np.arange(T + 1)) % VOCAB


@jax.jit
def train_step(state, seq):
    def loss_fn(p):
        logits = state.apply_fn({"params": p}, seq[:, :-1])
        tgt = optax.smooth_labels(jax.nn.one_hot(seq[:, 1:], VOCAB), 0.1)
        acc = (logits[:, 1:].argmax(-1) == seq[:, 2:]).mean()
        return optax.softmax_cross_entropy(logits, tgt).mean(), acc

    (loss, acc), g = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=g), loss, acc


model = LM()
rng = np.random.default_rng(0)
state = TrainState.create(apply_fn=model.apply,
                          params=model.init(jax.random.key(0), sequences(rng, 1)[:, :-1])["params"],
                          tx=optax.adamw(3e-3, weight_decay=0.01))
for i in range(200):
    state, loss, acc = train_step(state, sequences(rng, 32))
    if i % 25 == 0 or i == 199:
        print(f"step {i:3d} smoothed loss {loss:.4f} next-token acc {acc:.3f}")
