"""Causal transformer on a token-copy task; -inf masks, padding, per-class recall on each batch."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, LEN, DIM, PAD = 20, 16, 32, 0


def batch(rng, n=32):
    half = rng.integers(3, LEN // 2, n)
    tok = np.zeros((n, LEN), np.int32)
    for i, h in enumerate(half):
        s = rng.integers(1, VOCAB, h)
        tok[i, :2 * h] = np.r_[s, s]
    return tok


class Block(nn.Module):
    heads: int = 2

    @nn.compact
    def __call__(self, x, pad):
        b, t, c = x.shape
        h = nn.LayerNorm()(x)
        q, k, v = jnp.split(nn.Dense(3 * c)(h).reshape(b, t, self.heads, -1), 3, axis=-1)
        att = jnp.einsum("bihd,bjhd->bhij", q, k) / jnp.sqrt(c / self.heads)
        causal = jnp.tril(jnp.ones((t, t), bool))
        allowed = causal & ~pad[:, None, None, :]
        allowed = allowed | jnp.eye(t, dtype=bool)
        att = jax.nn.softmax(jnp.where(allowed, att, -jnp.inf), axis=-1)
        x = x + nn.Dense(c)(jnp.einsum("bhij,bjhd->bihd", att, v).reshape(b, t, c))
        return x + nn.Dense(c)(nn.gelu(nn.Dense(4 * c)(nn.LayerNorm()(x))))


class LM(nn.Module):
    @nn.compact
    def __call__(self, tok):
        pad = tok == PAD
        pos = self.param("pos", nn.initializers.normal(0.1), (LEN, DIM))
        x = nn.Embed(VOCAB, DIM)(tok) + pos[: tok.shape[1]]
        x = Block()(x, pad)
        logits = nn.Dense(VOCAB)(nn.LayerNorm()(x))
        return jnp.where(jnp.arange(VOCAB) == PAD, -jnp.inf, logits)


model = LM()


def loss_fn(params, tok):
    logits = model.apply(params, tok[:, :-1])
    target = tok[:, 1:]
    keep = target != PAD
    safe = jnp.where(keep, target, 1)
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, safe)
    return jnp.sum(jnp.where(keep, nll, 0.0)) / keep.sum(), logits


@jax.jit
def step(params, state, tok):
    (loss, logits), g = jax.value_and_grad(loss_fn, has_aux=True)(params, tok)
    upd, state = tx.update(g, state, params)
    return optax.apply_updates(params, upd), state, loss, logits


def recall_per_token(logits, tok):
    pred, target = np.asarray(logits).argmax(-1), tok[:, 1:]
    out = np.full(VOCAB, np.nan)
    for c in range(VOCAB):
        hit = target == c
        if c != PAD and hit.any():
            out[c] = (pred[hit] == c).mean()
    return out


rng = np.random.default_rng(0)
params = jax.jit(model.init)(jax.random.PRNGKey(0), batch(rng)[:, :-1])
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0, 5e-3, 10, 120)))
state = tx.init(params)
best = float("-inf")
for it in range(100):
    tok = batch(rng)
    params, state, loss, logits = step(params, state, tok)
    if it % 20 == 0:
        rec = recall_per_token(logits, tok)
        best = max(best, np.nanmean(rec))
        print(f"{it:3d} loss {float(loss):.3f} recall {np.nanmean(rec):.3f} absent {int(np.isnan(rec).sum())} best {best:.3f}", rec[:4].round(2))
