# sentence matching with a bag-of-embeddings encoder in half precision (float32 master weights)
import re
import numpy as np
import jax
import jax.numpy as jnp
import optax

TICKETS = """reset my password please | account | i forgot my password again | account
cannot log in to my account | account | please unlock the account | account
where is my parcel | shipping | the parcel has not arrived | shipping
track the shipping of order 5512 | shipping | delivery is late again | shipping
i want a refund for this order | billing | you charged my card twice | billing
invoice is wrong please correct | billing | refund the double charge | billing
the app crashes on start | bug | screen stays black after update | bug
button does not react at all | bug | crash when i open the camera | bug
??? | other | thanks a lot | other
good morning team | other | have a nice day | other"""
parts = [p.strip() for p in re.split(r"[|\n]", TICKETS)]
TEXTS, NAMES = parts[0::2], parts[1::2]
LABELS = sorted(set(NAMES))
STOP = {"the", "a", "is", "my", "to", "i", "of", "in", "on", "at", "for", "this", "has", "not", "and"}


def tokenize(s):
    return [w for w in re.findall(r"[a-z]+", s.lower()) if w not in STOP]


VOCAB = {w: i + 1 for i, w in enumerate(sorted({w for t in TEXTS for w in tokenize(t)}))}
WIDTH = max(len(tokenize(t)) for t in TEXTS)


def vectorize(texts):
    ids = np.zeros((len(texts), WIDTH), np.int32)
    for r, t in enumerate(texts):
        toks = [VOCAB[w] for w in tokenize(t)]
        ids[r, :len(toks)] = toks
    return ids


class Policy:
    """what jmp does, in three lines"""
    def __init__(self, compute):
        self.compute = compute

    def cast(self, tree):
        return jax.tree.map(lambda a: a.astype(self.compute), tree)


policy = Policy(jnp.float16)


def l2_normalize(v, eps=1e-12):
    sumsq = jnp.sum(v * v, axis=-1, keepdims=True)
    return v * jax.lax.rsqrt(jnp.maximum(sumsq, eps))


def pool(table, ids):
    mask = (ids > 0).astype(table.dtype)[..., None]
    return (table[ids] * mask).sum(axis=1)


def encode(p, ids):
    e = pool(p["table"], ids)
    e = e + jnp.tanh(e @ p["w1"]) @ p["w2"]
    return l2_normalize(e)


def loss_fn(params, ids, y, scale=8.0):
    p = policy.cast(params)
    emb = encode(p, ids)
    protos = l2_normalize(p["classes"])
    logits = (scale * emb @ protos.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def init(key, d=24):
    k = jax.random.split(key, 4)
    n = jax.random.normal
    return {"table": 0.3 * n(k[0], (len(VOCAB) + 1, d)), "w1": n(k[1], (d, d)) / d ** 0.5,
            "w2": 0.1 * n(k[2], (d, d)), "classes": n(k[3], (len(LABELS), d))}


ids, y = vectorize(TEXTS), np.array([LABELS.index(n) for n in NAMES])
params = init(jax.random.PRNGKey(2))
tx = optax.adamw(1e-2, weight_decay=1e-3)
state = tx.init(params)


@jax.jit
def step(params, state, ids, y):
    loss, g = jax.value_and_grad(loss_fn)(params, ids, y)
    up, state = tx.update(g, state, params)
    return optax.apply_updates(params, up), state, loss


rng = np.random.default_rng(12)
for it in range(50):
    b = rng.choice(len(y), 4, replace=False)
    params, state, loss = step(params, state, ids[b], y[b])
    print(f"it {it:2d} loss {float(loss):.4f}") if it % 4 == 0 else None
    if not np.isfinite(float(loss)):
        raise SystemExit(f"loss is {float(loss)} in iteration {it}")
pred = np.asarray(encode(params, ids) @ params["classes"].T).argmax(-1)
print("train accuracy", (pred == y).mean())
