import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, LENGTH = 24, 16


def recall_batch(rng, n):
    """Pairs key,value,key,value,... then a query key; the answer is the paired value."""
    half = VOCAB // 2
    pairs = (LENGTH - 1) // 2
    keys = np.stack([rng.permutation(half)[:pairs] for _ in range(n)])
    vals = half + rng.integers(0, half, (n, pairs))
    seq = np.stack([keys, vals], -1).reshape(n, -1)
    pick = rng.integers(0, pairs, n)
    seq = np.concatenate([seq, keys[np.arange(n), pick][:, None]], 1)
    return seq, vals[np.arange(n), pick] - half


class SelfAttention(nn.Module):
    heads: int
    dim: int

    @nn.compact
    def __call__(self, x):
        b, t, _ = x.shape
        hd = self.dim // self.heads
        q, k, v = [nn.Dense(self.dim, name=n)(x).reshape(b, t, self.heads, hd) for n in "qkv"]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.sqrt(hd)
        mask = jnp.tril(jnp.ones((t, t), bool))
        w = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        y = jnp.einsum("bhqk,bkhd->bqhd", w, v).reshape(b, t, self.dim)
        return nn.Dense(self.dim, name="o")(y)


class Recall(nn.Module):
    dim: int = 64
    heads: int = 2
    depth: int = 2

    @nn.compact
    def __call__(self, tok):
        init = nn.initializers.normal(0.5)
        h = nn.Embed(VOCAB, self.dim, embedding_init=init)(tok)
        prev = jnp.pad(h, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        h = nn.Dense(self.dim)(jnp.concatenate([h, prev], -1))
        for _ in range(self.depth):
            h = h + SelfAttention(self.heads, self.dim)(nn.LayerNorm()(h))
            m = nn.Dense(2 * self.dim)(nn.LayerNorm()(h))
            h = h + nn.Dense(self.dim)(nn.gelu(m))
        return nn.Dense(VOCAB // 2)(nn.LayerNorm()(h)[:, -1])


def main(steps=300, batch=64):
    rng = np.random.default_rng(0)
    model = Recall()
    params = model.init(jax.random.PRNGKey(0), jnp.zeros((1, 15), int))
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 30, steps), weight_decay=1e-4)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x, y):
        def f(p):
            logits = model.apply(p, x)
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return ce, jnp.mean(logits.argmax(-1) == y)
        (loss, acc), g = jax.value_and_grad(f, has_aux=True)(params)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, loss, acc

    for i in range(steps):
        x, y = recall_batch(rng, batch)
        params, state, loss, acc = step(params, state, x, y)
        if i % 40 == 0 or i == steps - 1:
            print(f"{i:4d} loss {float(loss):.3f} acc {float(acc):.3f}")


if __name__ == "__main__":
    main()
