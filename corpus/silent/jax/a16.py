"""Tiny causal LM: tied embeddings, residual branches that start at zero, linear warm-up."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

VOCAB, SEQ, DIM = 40, 20, 48
zeros = nn.initializers.zeros


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=3, out_kernel_init=zeros)(y, y, mask=mask)
        y = nn.gelu(nn.Dense(3 * DIM)(nn.LayerNorm()(x)))
        return x + nn.Dense(DIM, kernel_init=zeros)(y)


class LM(nn.Module):
    @nn.compact
    def __call__(self, ids):
        table = nn.Embed(VOCAB, DIM, embedding_init=nn.initializers.normal(0.1))
        x = table(ids) + self.param("pos", nn.initializers.normal(0.02), (SEQ, DIM))
        mask = nn.make_causal_mask(ids)
        for _ in range(2):
            x = Block()(x, mask)
        return table.attend(nn.LayerNorm()(x))


def text(n, seed):
    r = np.random.default_rng(seed)
    start, stride = r.integers(0, VOCAB, (n, 1)), r.integers(1, 4, (n, 1))
    return ((start + stride * np.arange(SEQ + 1)) % VOCAB).astype("int32")


model = LM()
params = model.init(jax.random.PRNGKey(0), text(1, 0)[:, :-1])
schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, warmup_steps=40, decay_steps=240)
tx = optax.adamw(schedule, weight_decay=0.01)
state = tx.init(params)


def loss_fn(params, batch):
    logits = model.apply(params, batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


@jax.jit
def step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for i in range(240):
    params, state, loss = step(params, state, text(32, i + 1))
    if i % 20 == 0 or i == 239:
        print(f"step {i:3d} lr {float(schedule(i)):.5f} loss {float(loss):.4f}")
