"""Intent classification with a GRU; large vocabulary, few of its words occur."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

VOCAB, LENGTH, INTENTS = 20000, 10, 4


def corpus(n, seed):
    rng = np.random.default_rng(seed)
    lexicon = np.random.default_rng(0).choice(np.arange(1, VOCAB), 120, replace=False)
    label = rng.integers(0, INTENTS, n)
    words = lexicon[rng.integers(40, 120, (n, LENGTH))]
    for k in range(3):
        where = rng.integers(0, LENGTH, n)
        words[np.arange(n), where] = lexicon[label * 10 + rng.integers(0, 10, n)]
    length = rng.integers(5, LENGTH + 1, n)
    words[np.arange(LENGTH)[None] >= length[:, None]] = 0
    return words.astype("int32"), label.astype("int32")


class IntentNet(nn.Module):
    @nn.compact
    def __call__(self, ids, train):
        mask = (ids != 0)
        e = nn.Embed(VOCAB, 24)(ids) * 4.0
        e = nn.Dropout(0.3, deterministic=not train)(e)
        h = nn.RNN(nn.GRUCell(features=32))(e)
        h = jnp.where(mask[..., None], h, -1.0).max(axis=1)
        return nn.Dense(INTENTS)(h)


net = IntentNet()
train_x, train_y = corpus(2000, 1)
test_x, test_y = corpus(400, 2)
params = net.init(jax.random.PRNGKey(0), train_x[:1], False)
tx = optax.adam(5e-3)
state = tx.init(params)


@jax.jit
def step(params, state, x, y, key):
    def loss_fn(p):
        logits = net.apply(p, x, True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


rng = np.random.default_rng(0)
for it in range(200):
    i = rng.integers(0, len(train_x), 64)
    params, state, loss = step(params, state, train_x[i], train_y[i], jax.random.PRNGKey(it))
    if it % 20 == 0 or it == 199:
        print("it %d loss %.4f" % (it, loss))
print("test accuracy %.3f" % (net.apply(params, test_x, False).argmax(-1) == test_y).mean())
