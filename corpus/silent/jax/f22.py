"""Masked-token pretraining on a small synthetic language, embeddings shared with the output."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, T, PAD, MASK = 40, 20, 0, 1


def corpus(seed, n):
    """Each sentence follows one of four token cycles; padded to T."""
    r = np.random.default_rng(seed)
    cycles = [r.permutation(np.arange(2, VOCAB - 8))[:6] for _ in range(4)]
    out = np.full((n, T), PAD)
    for row in out:
        length = r.integers(8, T + 1)
        c = cycles[r.integers(4)]
        row[:length] = np.take(c, r.integers(6) + np.arange(length), mode="wrap")
    return out


class Layer(nn.Module):
    dim: int

    @nn.compact
    def __call__(self, h, attn_mask):
        a = nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(h), mask=attn_mask)
        h = h + a
        m = nn.Dense(self.dim)(nn.gelu(nn.Dense(2 * self.dim)(nn.LayerNorm()(h))))
        return h + m


class TinyBert(nn.Module):
    dim: int = 48

    @nn.compact
    def __call__(self, tok):
        embed = nn.Embed(VOCAB, self.dim, embedding_init=nn.initializers.normal(0.1))
        pos = self.param("pos", nn.initializers.normal(0.1), (T, self.dim))
        keep = tok != PAD
        mask = nn.make_attention_mask(keep, keep)
        h = embed(tok) + pos
        for _ in range(2):
            h = Layer(self.dim)(h, mask)
        bias = self.param("bias", nn.initializers.zeros, (VOCAB,))
        return embed.attend(nn.LayerNorm()(h)) + bias


def mask_tokens(r, tok, p=0.12):
    chosen = (r.random(tok.shape) < p) & (tok != PAD)
    return np.where(chosen, MASK, tok), chosen.astype(np.float32)


def main(steps=350, batch=64):
    r = np.random.default_rng(0)
    data = corpus(0, 2000)
    model = TinyBert()
    params = model.init(jax.random.PRNGKey(0), jnp.asarray(data[:1]))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 40, steps), b2=0.98, weight_decay=0.01))
    state = tx.init(params)

    @jax.jit
    def step(params, state, inp, tgt, w):
        def f(p):
            logits = model.apply(p, inp)
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, tgt)
            z = 1e-4 * jnp.square(jax.nn.logsumexp(logits, -1))
            n = jnp.maximum(w.sum(), 1.0)
            hit = (logits.argmax(-1) == tgt) * w
            return jnp.sum((ce + z) * w) / n, jnp.sum(hit) / n
        (loss, acc), g = jax.value_and_grad(f, has_aux=True)(params)
        up, state = tx.update(g, state, params)
        return optax.apply_updates(params, up), state, loss, acc

    for i in range(steps):
        tok = data[r.integers(0, len(data), batch)]
        inp, w = mask_tokens(r, tok)
        params, state, loss, acc = step(params, state, inp, tok, w)
        if i % 50 == 0 or i == steps - 1:
            print(f"{i:3d} masked loss {float(loss):.4f} masked acc {float(acc):.3f} tokens {int(w.sum())}/{w.size}")


if __name__ == "__main__":
    main()
