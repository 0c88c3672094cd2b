"""Skip-gram with negative sampling on a synthetic topic corpus."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, TOPICS, DIM = 3000, 30, 24
NEG, BATCH, STEPS = 5, 256, 400


def build_corpus(rng, n_docs=1500, doc_len=20):
    topic_of_word = rng.integers(0, TOPICS, VOCAB)
    words_by_topic = [np.flatnonzero(topic_of_word == t) for t in range(TOPICS)]
    docs = []
    for _ in range(n_docs):
        t = rng.integers(0, TOPICS)
        docs.append(rng.choice(words_by_topic[t], doc_len))
    return np.stack(docs), topic_of_word


def sample_batch(rng, docs):
    d = rng.integers(0, len(docs), BATCH)
    i = rng.integers(0, docs.shape[1], BATCH)
    j = (i + rng.integers(1, docs.shape[1], BATCH)) % docs.shape[1]
    negatives = rng.integers(0, VOCAB, (BATCH, NEG))
    return docs[d, i], docs[d, j], negatives


def init(key):
    k1, _ = jax.random.split(key)
    return {
        "center": (jax.random.uniform(k1, (VOCAB, DIM)) - 0.5) / DIM,
        "context": jnp.zeros((VOCAB, DIM)),
    }


def sgns_loss(params, center, context, negatives):
    c = params["center"][center]
    pos = params["context"][context]
    neg = params["context"][negatives]
    pos_score = jnp.sum(c * pos, axis=-1)
    neg_score = jnp.einsum("bd,bnd->bn", c, neg)
    per_pair = jax.nn.softplus(-pos_score) + jax.nn.softplus(neg_score).sum(-1)
    return per_pair.mean()


tx = optax.adam(0.03, b1=0.0)


@jax.jit
def train_step(params, state, center, context, negatives):
    loss, grads = jax.value_and_grad(sgns_loss)(params, center, context, negatives)
    updates, state = tx.update(grads, state)
    return optax.apply_updates(params, updates), state, loss


def neighbour_purity(params, topic_of_word, rng):
    e = np.asarray(params["center"])
    e = e / np.linalg.norm(e, axis=1, keepdims=True)
    probe = rng.integers(0, VOCAB, 400)
    sims = e[probe] @ e.T
    sims[np.arange(400), probe] = -2
    nearest = np.argsort(-sims, axis=1)[:, :5]
    return (topic_of_word[nearest] == topic_of_word[probe][:, None]).mean()


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    docs, topic_of_word = build_corpus(rng)
    params = init(jax.random.PRNGKey(1))
    state = tx.init(params)
    print("purity before:", neighbour_purity(params, topic_of_word, rng))
    for step in range(STEPS):
        params, state, loss = train_step(params, state, *sample_batch(rng, docs))
        if step % 50 == 0:
            print(f"step {step:3d} loss {float(loss):.4f}")
    print("final loss", float(loss))
    print("purity after:", neighbour_purity(params, topic_of_word, rng))
