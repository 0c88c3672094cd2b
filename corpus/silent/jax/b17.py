# Sentiment of short token sequences: embedding, one self-attention layer, pooled classifier (flax nnx).
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, LEN, DIM = 400, 16, 8


class TokenTable(nnx.Module):
    def __init__(self, vocab, dim, *, rngs: nnx.Rngs):
        self.table = nnx.Variable(jax.random.normal(rngs.params(), (vocab, dim)) * 0.3)

    def __call__(self, ids):
        return jnp.take(self.table[...], ids, axis=0)


class Sentiment(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.tokens = TokenTable(VOCAB, DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=DIM, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(DIM, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, ids):
        h = self.tokens(ids)
        h = h + self.attention(h)
        h = nnx.relu(self.hidden(h.mean(axis=1)))
        return self.out(h)[:, 0]


class Corpus:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.polarity = self.rng.choice([-1.0, 0.0, 1.0], VOCAB)

    def draw(self, n):
        ids = self.rng.integers(0, VOCAB, (n, LEN))
        score = self.polarity[ids].sum(1)
        return ids, (score > 0).astype(np.float32)


def bce(model, ids, label):
    return optax.sigmoid_binary_cross_entropy(model(ids), label).mean()


@nnx.jit
def step(model, opt, ids, label):
    loss, grads = nnx.value_and_grad(bce)(model, ids, label)
    opt.update(model, grads)
    return loss


corpus = Corpus(5)
model = Sentiment(rngs=nnx.Rngs(5))
opt = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
running = None
for i in range(300):
    loss = float(step(model, opt, *corpus.draw(256)))
    running = loss if running is None else 0.9 * running + 0.1 * loss
    if (i + 1) % 50 == 0:
        print("iteration", i + 1, "smoothed loss", round(running, 4))
ids, label = corpus.draw(4000)
print("accuracy on fresh text", float(((model(ids) > 0) == (label > 0.5)).mean()))
