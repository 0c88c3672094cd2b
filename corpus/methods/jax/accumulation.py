"""Gradients accumulated over four micro-batches and clipped by their norm, a small character model."""
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

TEXT = ("the cat sat on the mat and the dog lay by the door while the rain fell on the roof of the house "
        "and the wind went round the corner to the garden where the old tree stood ") * 40


class GPT(nn.Module):
    vocab: int
    dim: int = 48

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x)
        h = nn.Embed(self.vocab, self.dim)(x) + nn.Embed(x.shape[1], self.dim)(jnp.arange(x.shape[1]))
        for _ in range(2):
            h = h + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(h), mask=mask)
            h = h + nn.Dense(self.dim)(nn.gelu(nn.Dense(2 * self.dim)(nn.LayerNorm()(h))))
        return nn.Dense(self.vocab)(nn.LayerNorm()(h))


def main(steps=120, micro=4, context=32):
    chars = sorted(set(TEXT))
    data = np.array([chars.index(c) for c in TEXT])
    model, r = GPT(len(chars)), np.random.default_rng(0)

    def batch():
        start = r.integers(0, len(data) - context - 1, 16)
        rows = np.stack([data[i : i + context + 1] for i in start])
        return rows[:, :-1], rows[:, 1:]

    params = model.init(jax.random.key(0), batch()[0])
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.linear_schedule(1.5e-4, 3e-3, 20), b2=0.95))
    state = tx.init(params)

    @jax.jit
    def gradients(params, x, y):
        def loss_fn(params):
            return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean() / micro

        return jax.value_and_grad(loss_fn)(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.global_norm(grads)

    for i in range(steps):
        total, summed = 0.0, jax.tree.map(jnp.zeros_like, params)
        for _ in range(micro):
            x, y = batch()
            loss, grads = gradients(params, x, y)
            summed = jax.tree.map(jnp.add, summed, grads)
            total += float(loss)
        params, state, norm = update(params, state, summed)
        if i % 20 == 0:
            print(f"{i:4d} loss {total:.4f} norm {float(norm):.3f}")
    right = (model.apply(params, x).argmax(-1) == y)[:, 8:].mean()
    print(f"loss {total:.4f} accuracy {float(right):.3f}")


if __name__ == "__main__":
    main()
