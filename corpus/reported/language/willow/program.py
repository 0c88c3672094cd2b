import functools
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

DIM, HEADS, TOKENS, CLASSES = 128, 2, 10, 4


class Attention(nn.Module):
    dtype: jnp.dtype = jnp.float16

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.DenseGeneral, features=(HEADS, DIM // HEADS), dtype=self.dtype)
        q, k, v = dense(name="q")(x), dense(name="k")(x), dense(name="v")(x)
        scale = (DIM // HEADS) ** -0.5
        attn = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
        attn = nn.softmax(attn, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", attn, v)
        return nn.DenseGeneral(DIM, axis=(-2, -1), dtype=self.dtype, name="out")(out)


class Detector(nn.Module):
    """Set of raw measurement tokens (position, log energy, amplitude) -> event class."""
    dtype: jnp.dtype = jnp.float16

    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(DIM, dtype=self.dtype)(tokens)
        x = x + Attention(self.dtype)(x)
        h = nn.LayerNorm(dtype=jnp.float32)(x)
        h = nn.gelu(nn.Dense(DIM, dtype=self.dtype)(h)).mean(axis=1)
        return nn.Dense(CLASSES, dtype=jnp.float32)(h)


rng = np.random.default_rng(6)
patterns = rng.normal(size=(CLASSES, 3, 16))


def events(n):
    y = rng.integers(0, CLASSES, n)
    which = rng.integers(0, 3, (n, TOKENS))
    clean = patterns[y[:, None], which] + 0.9 * rng.normal(size=(n, TOKENS, 16))
    gain = np.exp(0.55 * rng.normal(size=(n, 1, 1)))
    return jnp.asarray(clean * gain * 6.0, dtype=jnp.float32), jnp.asarray(y)


model = Detector()
x_train, y_train = events(6000)
x_val, y_val = events(500)
params = model.init(jax.random.PRNGKey(0), x_train[:2])
tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, 120))
opt_state = tx.init(params)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


@jax.jit
def train_step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, optax.global_norm(grads)


for step in range(120):
    idx = rng.integers(0, len(y_train), 32)
    params, opt_state, loss, gnorm = train_step(params, opt_state, x_train[idx], y_train[idx])
    if step % 10 == 0:
        print(f"step {step} loss {float(loss):.4f} grad norm {float(gnorm):.3f}")

print("FINAL", float(loss_fn(params, x_val, y_val)))
