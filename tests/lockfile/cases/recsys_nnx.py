"""Click model in flax nnx: embeddings, factorisation-machine term and a small deep part."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import stablenum_jax

USERS, ITEMS, TAGS, DENSE, DIM = 60, 90, 25, 6, 12
L2 = 1e-3


class ClickModel(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.normal(0.3)
        self.user = nnx.Embed(USERS, DIM, embedding_init=init, rngs=rngs)
        self.item = nnx.Embed(ITEMS, DIM, embedding_init=init, rngs=rngs)
        self.tag = nnx.Embed(TAGS, DIM, embedding_init=init, rngs=rngs)
        self.item_bias = nnx.Embed(ITEMS, 1, embedding_init=init, rngs=rngs)
        self.dense = nnx.Linear(DENSE, DIM, rngs=rngs)
        self.deep1 = nnx.Linear(4 * DIM, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.deep2 = nnx.Linear(32, 1, rngs=rngs)

    def bag(self, tags):
        """Average of the tags' vectors; tag 0 is padding."""
        vectors = self.tag(tags)
        present = (tags > 0).astype(vectors.dtype)[..., None]
        total = jnp.sum(vectors * present, axis=1)
        count = jnp.maximum(present.sum(axis=1), 1.0)
        return total / count

    def __call__(self, user, item, tags, dense):
        fields = [self.user(user), self.item(item), self.bag(tags), self.dense(dense)]
        stacked = jnp.stack(fields, axis=1)
        interaction = factorisation(stacked)
        h = self.deep1(stacked.reshape(stacked.shape[0], -1))
        h = nnx.relu(self.norm(h))
        deep = self.deep2(h)[:, 0]
        bias = self.item_bias(item)[:, 0]
        return interaction + deep + bias, stacked


def factorisation(v):
    """Sum over pairs of fields of their dot product, in linear time."""
    square_of_sum = jnp.square(v.sum(axis=1))
    sum_of_squares = jnp.square(v).sum(axis=1)
    return 0.5 * jnp.sum(square_of_sum - sum_of_squares, axis=-1)


def click_loss(logits, clicks, weight):
    log_p = jax.nn.log_sigmoid(logits)
    log_not_p = jax.nn.log_sigmoid(-logits)
    nll = -(clicks * log_p + (1.0 - clicks) * log_not_p)
    return jnp.sum(weight * nll) / jnp.sum(weight)


def make_data(n=32, bag=5, seed=13):
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, USERS, n), rng.integers(0, ITEMS, n)
    tags = rng.integers(1, TAGS, (n, bag))
    tags[np.arange(bag) >= rng.integers(1, bag + 1, n)[:, None]] = 0
    dense = np.log1p(rng.exponential(2.0, (n, DENSE)))
    clicks = rng.random(n) < 0.3
    weight = rng.uniform(0.5, 2.0, n)
    ints = [a.astype(np.int32) for a in (user, item, tags)]
    return ints + [a.astype(np.float32) for a in (dense, clicks, weight)]


def program():
    model = ClickModel(nnx.Rngs(13))
    graphdef, params = nnx.split(model)

    def loss_fn(params, user, item, tags, dense, clicks, weight):
        model = nnx.merge(graphdef, params)
        logits, vectors = model(user, item, tags, dense)
        penalty = jnp.mean(jnp.sum(vectors**2, axis=(1, 2)))
        return click_loss(logits, clicks, weight) + L2 * penalty

    optimizer = optax.adam(1e-3, b1=0.9, b2=0.99)
    return stablenum_jax.program(loss_fn, params, *make_data(), optimizer=optimizer)
