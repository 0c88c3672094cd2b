import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, CTX, DIM, HEADS = 20, 16, 32, 4


def markov_text(rng, length=20000):
    table = rng.dirichlet(np.full(VOCAB, 0.08), size=(VOCAB,))
    cdf = table.cumsum(1)
    seq = np.zeros(length, np.int32)
    u = rng.random(length)
    for i in range(1, length):
        seq[i] = min(np.searchsorted(cdf[seq[i - 1]], u[i]), VOCAB - 1)
    return seq


def dense(key, m, n):
    return jax.random.normal(key, (m, n)) / np.sqrt(m)


def init_params(key):
    k = jax.random.split(key, 7)
    return {
        "tok": 0.5 * jax.random.normal(k[0], (VOCAB, DIM)),
        "pos": 0.1 * jax.random.normal(k[1], (CTX, DIM)),
        "qkv": dense(k[2], DIM, 3 * DIM),
        "proj": dense(k[3], DIM, DIM),
        "up": dense(k[4], DIM, 4 * DIM),
        "down": dense(k[5], 4 * DIM, DIM),
        "head": dense(k[6], DIM, VOCAB),
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x ** 2, axis=-1, keepdims=True) + 1e-6)


def attention(p, x):
    b, t, d = x.shape
    q, k, v = jnp.split((x @ p["qkv"]).reshape(b, t, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((t, t), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, d) @ p["proj"]


def lm(p, tokens):
    x = p["tok"][tokens] + p["pos"]
    x = x + attention(p, norm(x))
    x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    return norm(x) @ p["head"]


def loss_fn(p, chunk):
    logits = lm(p, chunk[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, chunk[:, 1:]).mean()


schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, 250, 5e-4)
tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, 0.9, 0.98, 0.1))


@jax.jit
def train_step(p, state, chunk):
    loss, grads = jax.value_and_grad(loss_fn)(p, chunk)
    updates, state = tx.update(grads, state, p)
    return optax.apply_updates(p, updates), state, loss


def main():
    rng = np.random.default_rng(0)
    text = markov_text(rng)
    params = init_params(jax.random.PRNGKey(0))
    state = tx.init(params)
    recent = []
    for step in range(250):
        start = rng.integers(0, len(text) - CTX - 1, 32)
        chunk = text[start[:, None] + np.arange(CTX + 1)]
        params, state, loss = train_step(params, state, chunk)
        recent.append(float(loss))
        if step % 50 == 0:
            print(f"step {step:3d} | loss {recent[-1]:.4f}")
    print("mean loss of the last 30 steps", np.mean(recent[-30:]))


if __name__ == "__main__":
    main()
