"""Neural CRF tagger with forbidden transitions (-inf), Viterbi decoding and per-tag scores. Toy BIO chunking."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

TAGS = ["O", "B-NP", "I-NP", "B-LOC", "I-LOC"]
K, L, V, D = len(TAGS), 12, 40, 16
FORBID = np.zeros((K, K), bool)
for a in range(K):
    for b in (2, 4):
        FORBID[a, b] = a not in (b - 1, b)
START_FORBID = np.array([False, False, True, False, True])


def make(rng, n):
    tags, words = np.zeros((n, L), np.int32), np.zeros((n, L), np.int32)
    for i in range(n):
        prev = None
        for t in range(L):
            bad = START_FORBID if prev is None else FORBID[prev]
            w = np.where(bad, 0, np.array([3.0, 2.0, 3.0, 0.02, 0.5]))
            prev = rng.choice(K, p=w / w.sum())
            tags[i, t] = prev
        words[i] = tags[i] * 8 + rng.integers(0, 8, L)
    noise = rng.random((n, L)) < 0.15
    words[noise] = rng.integers(0, V, noise.sum())
    return words, tags


def init(key):
    k = jax.random.split(key, 4)
    return {"emb": jax.random.normal(k[0], (V, D)), "w": jax.random.normal(k[1], (3 * D, K)) / np.sqrt(3 * D),
            "b": jnp.zeros(K), "trans": 0.1 * jax.random.normal(k[2], (K, K))}


def potentials(p, words):
    e = jnp.pad(p["emb"][words], ((1, 1), (0, 0)))
    win = jnp.concatenate([e[:-2], e[1:-1], e[2:]], -1)
    emit = win @ p["w"] + p["b"]
    return emit, jnp.where(FORBID, -jnp.inf, p["trans"]), jnp.where(START_FORBID, -jnp.inf, 0.0)


def sentence_nll(p, words, tags):
    emit, trans, start = potentials(p, words)

    def fwd(alpha, e):
        return jax.nn.logsumexp(alpha[:, None] + trans, axis=0) + e, None

    alpha, _ = jax.lax.scan(fwd, start + emit[0], emit[1:])
    gold = emit[jnp.arange(L), tags].sum() + trans[tags[:-1], tags[1:]].sum() + start[tags[0]]
    return jax.nn.logsumexp(alpha) - gold


def viterbi(p, words):
    emit, trans, start = potentials(p, words)

    def fwd(delta, e):
        s = delta[:, None] + trans
        return s.max(0) + e, s.argmax(0)

    delta, back = jax.lax.scan(fwd, start + emit[0], emit[1:])
    last = delta.argmax()
    _, path = jax.lax.scan(lambda t, bp: (bp[t], bp[t]), last, back, reverse=True)
    return jnp.append(path, last)


loss_fn = lambda p, w, t: jax.vmap(sentence_nll, (None, 0, 0))(p, w, t).mean()
decode = jax.jit(jax.vmap(viterbi, (None, 0)))
tx = optax.chain(optax.clip_by_global_norm(5.0), optax.adam(2e-2))


@jax.jit
def step(p, s, w, t):
    l, g = jax.value_and_grad(loss_fn)(p, w, t)
    u, s = tx.update(g, s, p)
    return optax.apply_updates(p, u), s, l


def f1_per_tag(pred, gold):
    with np.errstate(divide="ignore", invalid="ignore"):
        tp = np.array([((pred == k) & (gold == k)).sum() for k in range(K)], float)
        prec = tp / np.array([(pred == k).sum() for k in range(K)])
        rec = tp / np.array([(gold == k).sum() for k in range(K)])
        return 2 * prec * rec / (prec + rec)


rng = np.random.default_rng(3)
train_w, train_t = make(rng, 200)
dev_w, dev_t = make(rng, 15)
params = init(jax.random.PRNGKey(0))
state = tx.init(params)
best, best_params = -np.inf, None
for i in range(60):
    b = rng.choice(200, 32, replace=False)
    params, state, l = step(params, state, train_w[b], train_t[b])
    if i % 10 == 9:
        f1 = f1_per_tag(np.asarray(decode(params, dev_w)), dev_t)
        macro = np.nanmean(f1)
        print(f"{i + 1} nll {float(l):.3f} macro f1 {macro:.3f}", dict(zip(TAGS, f1.round(2).tolist())))
        if macro > best:
            best, best_params = macro, params
assert best > 0.7 and np.isfinite(float(l))
print("best dev macro f1", round(float(best), 3))
