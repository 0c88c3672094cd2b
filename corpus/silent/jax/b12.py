"""Key-value lookup with one attention head: the last token asks for a key, the answer is that key's value."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

KEYS, VALUES, PAIRS, D = 40, 16, 20, 64


def sample(rng, n):
    keys = np.stack([rng.permutation(KEYS)[:PAIRS] for _ in range(n)])
    vals = rng.integers(0, VALUES, (n, PAIRS))
    pick = rng.integers(0, PAIRS, n)
    rows = np.arange(n)
    return keys, vals, keys[rows, pick], vals[rows, pick]


def glorot(key, shape):
    return jax.random.normal(key, shape) * np.sqrt(2.0 / sum(shape))


def init(key):
    k = jax.random.split(key, 8)
    return {"key_emb": jax.random.normal(k[0], (KEYS, D)), "val_emb": jax.random.normal(k[1], (VALUES, D)),
            "ask_emb": jax.random.normal(k[7], (KEYS, D)),
            "q": glorot(k[2], (D, D)), "k": glorot(k[3], (D, D)), "v": glorot(k[4], (D, D)),
            "o": glorot(k[5], (D, D)), "head": glorot(k[6], (D, VALUES))}


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attend(p, query, memory):
    q = query @ p["q"]
    k = memory @ p["k"]
    v = memory @ p["v"]
    scores = jnp.einsum("bd,btd->bt", q, k) * D ** 0.5
    return jnp.einsum("bt,btd->bd", jax.nn.softmax(scores, axis=-1), v) @ p["o"]


def predict(p, keys, vals, ask):
    memory = layer_norm(p["key_emb"][keys] + p["val_emb"][vals])
    query = layer_norm(p["ask_emb"][ask])
    return attend(p, query, memory) @ p["head"]


def loss_fn(p, keys, vals, ask, answer):
    logits = predict(p, keys, vals, ask)
    return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-3))


@jax.jit
def step(p, s, *batch):
    loss, g = jax.value_and_grad(loss_fn)(p, *batch)
    u, s = tx.update(g, s)
    return optax.apply_updates(p, u), s, loss


rng = np.random.default_rng(0)
params = init(jax.random.key(0))
state = tx.init(params)
for i in range(300):
    params, state, loss = step(params, state, *sample(rng, 256))
    if i % 30 == 0:
        print(f"step {i:3d} loss {loss:.3f}")
keys, vals, ask, answer = sample(rng, 2000)
acc = (predict(params, keys, vals, ask).argmax(-1) == answer).mean()
print(f"final loss {loss_fn(params, keys, vals, ask, answer):.3f} accuracy {acc:.3f}")
