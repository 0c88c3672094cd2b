"""Reverse-copy task with a decoder-only transformer (flax linen)."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

VOCAB, HALF, WIDTH = 12, 5, 64
SEQ = 2 * HALF


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(name="ln_a")(x)
        x = x + nn.SelfAttention(num_heads=4, name="attn")(h, mask=mask)
        h = nn.LayerNorm(name="ln_m")(x)
        h = nn.relu(nn.Dense(128, name="up")(h))
        return x + nn.Dense(WIDTH, name="down")(h)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(VOCAB + 1, WIDTH, name="tok")(ids) * WIDTH ** 0.5
        x = x + nn.Embed(SEQ, WIDTH, name="pos")(jnp.arange(SEQ)) * WIDTH ** 0.5
        for i in range(2):
            x = Layer(name=f"layer{i}")(x, nn.make_causal_mask(ids))
        return nn.Dense(VOCAB, name="lm_head")(nn.LayerNorm(name="ln_f")(x))


def make_batch(rng, n=48):
    a = rng.integers(0, VOCAB, (n, HALF))
    full = np.concatenate([a, np.full((n, 1), VOCAB), a[:, ::-1]], axis=1)
    return full[:, :-1], a[:, ::-1].copy()


def loss_fn(params, ids, target):
    logits = model.apply(params, ids)[:, HALF:]
    ce = optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()
    return ce, (logits.argmax(-1) == target).mean()


model = Decoder()
rng = np.random.default_rng(0)
params = model.init(jax.random.PRNGKey(0), make_batch(rng)[0])
tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.add_decayed_weights(0.1),
    optax.adam(2e-3),
)
state = tx.init(params)


@jax.jit
def train_step(params, state, ids, target):
    (ce, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, ids, target)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, ce, acc


for step in range(200):
    params, state, ce, acc = train_step(params, state, *make_batch(rng))
    if step % 20 == 0 or step == 199:
        print(f"step {step:3d} ce {float(ce):.4f} acc {float(acc):.3f}")
