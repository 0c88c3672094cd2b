"""Small causal transformer (flax linen) with T5 style relative position buckets, two hidden successor rules."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, SEQ, DIM, HEADS, PAD = 12, 24, 32, 4, 0


def relative_bucket(rel, n_buckets=16, max_dist=32):
    n = jnp.maximum(-rel, 0)
    exact = n_buckets // 2
    small = n < exact
    large = exact + (jnp.log(n / exact) / np.log(max_dist / exact) * (n_buckets - exact))
    large = jnp.minimum(jnp.where(small, 0.0, large), n_buckets - 1).astype(jnp.int32)
    return jnp.where(small, n, large)


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, pad):
        b, t, d = x.shape
        qkv = nn.Dense(3 * d, use_bias=False)(x).reshape(b, t, 3, HEADS, d // HEADS)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        pos = jnp.arange(t)
        bucket = relative_bucket(pos[None, :] - pos[:, None])
        bias = nn.Embed(16, HEADS)(bucket).transpose(2, 0, 1)[None]
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d // HEADS) + bias
        causal = jnp.tril(jnp.ones((t, t), bool))[None, None]
        keep = causal & (~pad)[:, None, None, :]
        logits = jnp.where(keep, logits, -jnp.inf)
        o = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(logits), v).reshape(b, t, d)
        return nn.Dense(d, use_bias=False)(o)


class Net(nn.Module):
    @nn.compact
    def __call__(self, ids):
        pad = ids == PAD
        x = nn.Embed(VOCAB, DIM)(ids)
        for _ in range(1):
            x = x + Attention()(nn.RMSNorm()(x), pad)
            x = x + nn.Dense(DIM)(nn.gelu(nn.Dense(3 * DIM)(nn.RMSNorm()(x))))
        logits = nn.Dense(VOCAB)(nn.RMSNorm()(x))
        return logits.at[..., PAD].set(-jnp.inf)


RULES = np.random.default_rng(5).permuted(np.tile(np.arange(1, VOCAB), (2, 1)), axis=1)


def batch(rng, n=24):
    out = np.zeros((n, SEQ + 1), np.int32)
    for r in range(n):
        out[r, 0] = rng.integers(1, VOCAB)
        rule = RULES[out[r, 0] % 2]
        for t in range(1, rng.integers(SEQ // 2, SEQ + 2)):
            out[r, t] = rule[out[r, t - 1] - 1] if rng.random() < 0.95 else rng.integers(1, VOCAB)
    return out[:, :-1], out[:, 1:]


net = Net()
rng = np.random.default_rng(0)
params = jax.jit(net.init)(jax.random.PRNGKey(0), batch(rng)[0])
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 8, 60)))
state = tx.init(params)


def loss_fn(p, x, y):
    logp = nn.log_softmax(net.apply(p, x))
    real = y != PAD
    tok = jnp.take_along_axis(logp, jnp.where(real, y, 1)[..., None], -1)[..., 0]
    nll = -jnp.where(real, tok, 0.0).sum() / real.sum()
    hit = (jnp.where(real, logp.argmax(-1) == y, False)).sum() / real.sum()
    return nll, hit


@jax.jit
def step(p, s, x, y):
    (l, hit), g = jax.value_and_grad(loss_fn, has_aux=True)(p, x, y)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, l, hit


best = -np.inf
for i in range(60):
    params, state, l, hit = step(params, state, *batch(rng))
    if i % 15 == 14:
        best = max(best, float(hit))
        print(f"{i + 1:3d} nll {float(l):.4f} acc {float(hit):.3f} best {best:.3f}")
bad = [k for k, v in jax.tree_util.tree_leaves_with_path(params) if not bool(jnp.isfinite(v).all())]
assert not bad and best > 0.8, (bad, best)
print("least likely logit for PAD:", float(jax.jit(net.apply)(params, batch(rng)[0])[0, 0, PAD]))
