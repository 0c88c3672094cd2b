# Bag-of-words sentiment model kept entirely in half precision to save memory.
import numpy as np
import jax, jax.numpy as jnp
import optax

VOCAB, DIM, LEN = 400, 16, 12
rng = np.random.default_rng(0)

# Zipf-like word frequencies: some words hardly ever appear
freq = 1.0 / np.arange(1, VOCAB + 1)
freq /= freq.sum()
polarity = rng.normal(size=VOCAB)


def make_batch(n=32):
    words = rng.choice(VOCAB, size=(n, LEN), p=freq)
    label = (polarity[words].sum(1) > 0).astype(np.int32)
    return words, label


def init(seed):
    k1, k2 = jax.random.split(jax.random.PRNGKey(seed))
    p = {
        "emb": 0.1 * jax.random.normal(k1, (VOCAB, DIM)),
        "out": 0.3 * jax.random.normal(k2, (DIM, 2)),
        "bias": jnp.zeros(2),
    }
    return jax.tree_util.tree_map(lambda a: a.astype(jnp.float16), p)


def loss_fn(p, words, label):
    pooled = p["emb"][words].mean(axis=1)
    logits = (pooled @ p["out"] + p["bias"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


params = init(1)
opt = optax.adam(5e-3)
state = opt.init(params)


@jax.jit
def step(params, state, words, label):
    loss, g = jax.value_and_grad(loss_fn)(params, words, label)
    upd, state = opt.update(g, state, params)
    params = optax.apply_updates(params, upd)
    return params, state, loss


history = []
for i in range(150):
    params, state, loss = step(params, state, *make_batch())
    history.append(float(loss))
    if (i + 1) % 15 == 0:
        print("step", i + 1, "mean loss", round(float(np.mean(history[-15:])), 4))
