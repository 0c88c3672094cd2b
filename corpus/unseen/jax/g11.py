# Tiny masked encoder: count how often token 3 occurs in a padded sequence.
# Activations run in float16, parameters stay in float32.
import jax
import jax.numpy as jnp
import numpy as np
import optax
import flax.linen as nn

PAD, VOCAB, MAXLEN, WIDTH = 0, 9, 16, 32


class SelfAttention(nn.Module):
    heads: int
    dtype: jnp.dtype = jnp.float16

    @nn.compact
    def __call__(self, x, keep):
        b, t, d = x.shape
        dh = d // self.heads
        q, k, v = (
            nn.Dense(d, dtype=self.dtype, name=n)(x).reshape(b, t, self.heads, dh)
            for n in ("q", "k", "v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * dh**-0.5
        bias = (1 - keep.astype(self.dtype)) * -1e9
        weights = nn.softmax(scores + bias[:, None, None, :], axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d)
        return nn.Dense(d, dtype=self.dtype, name="o")(mixed)


class Counter(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        keep = tokens != PAD
        x = nn.Embed(VOCAB, WIDTH, dtype=jnp.float16)(tokens)
        x = x + SelfAttention(heads=4)(x, keep)
        x = x + nn.Dense(WIDTH, dtype=jnp.float16)(nn.relu(x))
        summed = jnp.sum(jnp.where(keep[..., None], x, 0), axis=1)
        return nn.Dense(1)(summed.astype(jnp.float32) / 4.0)[:, 0]


def batch(rng, n=64):
    tokens = rng.integers(1, VOCAB, (n, MAXLEN))
    lengths = rng.integers(3, MAXLEN + 1, n)
    tokens = np.where(np.arange(MAXLEN) < lengths[:, None], tokens, PAD)
    return tokens, (tokens == 3).sum(1).astype(np.float32)


model = Counter()
rng = np.random.default_rng(0)
params = model.init(jax.random.PRNGKey(0), batch(rng, 2)[0])
tx = optax.adamw(2e-3)
opt_state = tx.init(params)


@jax.jit
def train_step(params, opt_state, tokens, target):
    def loss_fn(p):
        return jnp.mean((model.apply(p, tokens) - target) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for it in range(200):
    params, opt_state, loss = train_step(params, opt_state, *batch(rng))
    if it % 20 == 0:
        print(f"it={it} mse={float(loss):.4f}")
