# Bag-of-words topic model: big embedding table, each batch touches few rows
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, TOPICS, LEN, DIM = 1200, 6, 12, 16
rng = np.random.default_rng(0)
word_topic = rng.integers(0, TOPICS, VOCAB)
by_topic = [np.flatnonzero(word_topic == t) for t in range(TOPICS)]


def docs(n):
    t = rng.integers(0, TOPICS, n)
    w = np.where(rng.random((n, LEN)) < 0.7,
                 np.stack([rng.choice(by_topic[k], LEN) for k in t]),
                 rng.integers(0, VOCAB, (n, LEN)))
    return w, t


class BoW(eqx.Module):
    emb: eqx.nn.Embedding
    out: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.emb = eqx.nn.Embedding(weight=0.1 * jax.random.normal(a, (VOCAB, DIM)))
        self.out = eqx.nn.Linear(DIM, TOPICS, key=b)

    def __call__(self, words):
        return self.out(jax.vmap(self.emb)(words).sum(0))


model = BoW(jax.random.PRNGKey(0))
opt = optax.adagrad(0.15)
state = opt.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def step(model, state, w, t):
    def loss_fn(m):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(m)(w), t).mean()

    loss, g = eqx.filter_value_and_grad(loss_fn)(model)
    u, state = opt.update(g, state)
    return eqx.apply_updates(model, u), state, loss


for i in range(300):
    w, t = docs(24)
    model, state, loss = step(model, state, w, t)
    if i % 50 == 0 or i == 299:
        print(i, "loss", float(loss))
w, t = docs(500)
print("accuracy", float((jax.vmap(model)(w).argmax(-1) == t).mean()))
