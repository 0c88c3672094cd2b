import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

KEY_DIM, VAL_DIM, N_ITEMS = 24, 8, 24
HIDDEN, HEADS = 256, 1
STEPS, BATCH = 400, 64


class Attention(nn.Module):
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, query, memory):
        b, t, _ = memory.shape
        d = self.hidden // self.heads
        q = nn.Dense(self.hidden, use_bias=False, name="q")(query).reshape(b, -1, self.heads, d)
        k = nn.Dense(self.hidden, use_bias=False, name="k")(memory).reshape(b, t, self.heads, d)
        v = nn.Dense(self.hidden, use_bias=False, name="v")(memory).reshape(b, t, self.heads, d)
        scale = d ** 0.5
        logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
        weights = jax.nn.softmax(logits, axis=-1)
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.Dense(self.hidden, name="o")(out.reshape(b, -1, self.hidden))


class MemoryReader(nn.Module):
    @nn.compact
    def __call__(self, query, keys, values):
        memory = jnp.concatenate([keys, values], axis=-1)
        h = Attention(HIDDEN, HEADS)(query[:, None, :], memory)[:, 0]
        h = nn.LayerNorm()(h)
        h = h + nn.Dense(HIDDEN)(nn.relu(nn.Dense(HIDDEN)(h)))
        return nn.Dense(VAL_DIM)(h)


def make_batch(rng, rotation, n):
    keys = 1.5 * rng.standard_normal((n, N_ITEMS, KEY_DIM)).astype(np.float32)
    labels = rng.integers(0, VAL_DIM, (n, N_ITEMS))
    values = np.eye(VAL_DIM, dtype=np.float32)[labels]
    pick = rng.integers(0, N_ITEMS, n)
    rows = np.arange(n)
    query = keys[rows, pick] @ rotation + 0.05 * rng.standard_normal((n, KEY_DIM))
    return query.astype(np.float32), keys, values, labels[rows, pick]


def main():
    rng = np.random.default_rng(11)
    rotation, _ = np.linalg.qr(rng.standard_normal((KEY_DIM, KEY_DIM)))
    model = MemoryReader()
    q, k, v, _ = make_batch(rng, rotation, 2)
    params = model.init(jax.random.PRNGKey(5), q, k, v)
    tx = optax.adam(1e-3)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, q, k, v, y):
        def loss_fn(p):
            logits = model.apply(p, q, k, v)
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
            return loss, (logits.argmax(-1) == y).mean()

        (loss, acc), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, acc

    hist = []
    for i in range(STEPS):
        batch = make_batch(rng, rotation, BATCH)
        params, opt_state, loss, acc = step(params, opt_state, *batch)
        hist.append(float(acc))
        if i % 40 == 0:
            print(f"{i:4d} loss {float(loss):.4f} acc {float(acc):.3f}")
    print("mean accuracy of the last 40 batches:", np.mean(hist[-40:]))


if __name__ == "__main__":
    main()
