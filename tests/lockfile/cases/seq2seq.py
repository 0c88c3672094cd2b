"""Translation-style seq2seq: LSTM encoder, LSTM decoder with additive attention, lax.scan."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

import stablenum_jax

SOURCE, TARGET, EMBED, HIDDEN, PAD = 40, 45, 16, 24, 0


def init_lstm(rng, n_in, hidden):
    size = n_in + hidden
    return {"w": rng.normal(0, size**-0.5, (size, 4 * hidden)), "b": np.zeros(4 * hidden)}


def init_params(seed=16):
    rng = np.random.default_rng(seed)
    params = {
        "source_embed": rng.normal(0, 0.5, (SOURCE, EMBED)),
        "target_embed": rng.normal(0, 0.5, (TARGET, EMBED)),
        "encoder": init_lstm(rng, EMBED, HIDDEN),
        "decoder": init_lstm(rng, EMBED + HIDDEN, HIDDEN),
        "attention": {
            "query": rng.normal(0, 0.3, (HIDDEN, HIDDEN)),
            "key": rng.normal(0, 0.3, (HIDDEN, HIDDEN)),
            "score": rng.normal(0, 0.5, HIDDEN),
        },
        "project": {"w": rng.normal(0, 0.2, (2 * HIDDEN, TARGET)), "b": np.zeros(TARGET)},
    }
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)


def lstm_cell(p, state, x):
    h, c = state
    gates = jnp.concatenate([x, h], axis=-1) @ p["w"] + p["b"]
    i, f, g, o = jnp.split(gates, 4, axis=-1)
    keep = jax.nn.sigmoid(f + 1.0)
    c = keep * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h, c


def encode(p, x, mask):
    """x is (time, batch, embed); finished rows keep their last state."""
    zeros = jnp.zeros((x.shape[1], HIDDEN), x.dtype)

    def step(state, inputs):
        x_t, valid = inputs
        h, c = lstm_cell(p, state, x_t)
        state = (jnp.where(valid[:, None], h, state[0]), jnp.where(valid[:, None], c, state[1]))
        return state, state[0]

    return jax.lax.scan(step, (zeros, zeros), (x, mask))


def attend(p, query, keys, memory, mask):
    hidden = jnp.tanh(query @ p["query"] + keys)
    scores = hidden @ p["score"]
    scores = jnp.where(mask, scores, -1e9)
    weights = jnp.exp(scores - scores.max(axis=0))
    weights = weights / weights.sum(axis=0)
    return jnp.einsum("sb,sbh->bh", weights, memory)


def decode(params, state, y, memory, mask):
    keys = memory @ params["attention"]["key"]

    def step(carry, y_t):
        state, context = carry
        state = lstm_cell(params["decoder"], state, jnp.concatenate([y_t, context], axis=-1))
        context = attend(params["attention"], state[0], keys, memory, mask)
        return (state, context), jnp.concatenate([state[0], context], axis=-1)

    carry = (state, jnp.zeros_like(state[0]))
    return jax.lax.scan(step, carry, y)[1]


def make_pairs(batch=6, source_len=10, target_len=9, seed=17):
    rng = np.random.default_rng(seed)
    source = rng.integers(1, SOURCE, (source_len, batch))
    target = rng.integers(1, TARGET, (target_len, batch))
    source[np.arange(source_len)[:, None] >= rng.integers(5, source_len + 1, batch)] = PAD
    target[np.arange(target_len)[:, None] >= rng.integers(5, target_len + 1, batch)] = PAD
    return source.astype(np.int32), target.astype(np.int32)


def program():
    def loss_fn(params, source, target):
        mask = source != PAD
        state, memory = encode(params["encoder"], params["source_embed"][source], mask)
        outputs = decode(params, state, params["target_embed"][target[:-1]], memory, mask)
        logits = outputs @ params["project"]["w"] + params["project"]["b"]
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        labels = target[1:]
        nll = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
        keep = (labels != PAD).astype(nll.dtype)
        return jnp.sum(nll * keep) / jnp.sum(keep)

    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5, momentum=0.9))
    return stablenum_jax.program(loss_fn, init_params(), *make_pairs(), optimizer=optimizer)
