"""Bag-of-words sentiment model kept entirely in half precision to save memory."""
import functools
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, EMB, SEQ = 800, 24, 20


def corpus(n, seed):
    rng = np.random.default_rng(seed)
    freq = 1.0 / (np.arange(VOCAB) + 5.0)
    polarity = rng.choice([-1.0, 0.0, 1.0], VOCAB, p=[0.2, 0.6, 0.2])
    tok = rng.choice(VOCAB, size=(n, SEQ), p=freq / freq.sum())
    score = polarity[tok].sum(1) + 0.3 * rng.standard_normal(n)
    return tok.astype(np.int32), (score > 0).astype(np.float32)


def init_params(key):
    k1, k2, k3 = jax.random.split(key, 3)
    params = {
        "emb": 0.1 * jax.random.normal(k1, (VOCAB, EMB)),
        "w1": jax.random.normal(k2, (EMB, 32)) / np.sqrt(EMB),
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(k3, (32,)) / np.sqrt(32),
    }
    return jax.tree.map(lambda a: a.astype(jnp.float16), params)


def forward(params, tok):
    h = params["emb"][tok].mean(axis=1)
    h = jnp.tanh(h @ params["w1"] + params["b1"])
    return h @ params["w2"]


def bce(params, tok, y):
    logit = forward(params, tok).astype(jnp.float32)
    return jnp.mean(jnp.logaddexp(0.0, logit) - y * logit)


@functools.partial(jax.jit, static_argnums=0)
def update(tx, params, state, tok, y):
    loss, grads = jax.value_and_grad(bce)(params, tok, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def main():
    tok, y = corpus(1024, 0)
    params = init_params(jax.random.PRNGKey(1))
    tx = optax.adam(learning_rate=1e-3)
    state = tx.init(params)
    rng = np.random.default_rng(2)
    for it in range(120):
        i = rng.integers(0, len(y), 64)
        params, state, loss = update(tx, params, state, tok[i], y[i])
        if it % 10 == 0:
            acc = np.mean((np.asarray(forward(params, tok)) > 0) == (y > 0.5))
            print(f"step {it} loss {loss:.4f} acc {acc:.3f}")


main()
