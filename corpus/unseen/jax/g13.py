"""Linear-chain CRF for BIO tagging with hard transition constraints."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

O, B, I = 0, 1, 2
TAGS, WORDS, STEPS = 3, 30, 12
ALLOWED = jnp.ones((TAGS, TAGS), bool).at[O, I].set(False)   # no I after O
START_OK = jnp.array([True, True, False])                    # no I at start


def constrain(p):
    trans = jnp.where(ALLOWED, p["trans"], -jnp.inf)
    start = jnp.where(START_OK, p["start"], -jnp.inf)
    return start, trans


def log_partition(p, emit):
    start, trans = constrain(p)

    def advance(alpha, e):
        return jax.nn.logsumexp(alpha[:, None] + trans, axis=0) + e, None

    alpha, _ = jax.lax.scan(advance, start + emit[0], emit[1:])
    return jax.nn.logsumexp(alpha)


def path_score(p, emit, tags):
    start, trans = constrain(p)
    s = start[tags[0]] + emit[jnp.arange(STEPS), tags].sum()
    return s + trans[tags[:-1], tags[1:]].sum()


def nll(p, words, tags):
    emit = p["emit"][words]
    z = jax.vmap(log_partition, (None, 0))(p, emit)
    s = jax.vmap(path_score, (None, 0, 0))(p, emit, tags)
    return jnp.mean(z - s)


def sample_sentences(rng, n=32):
    words = np.zeros((n, STEPS), int)
    tags = np.zeros((n, STEPS), int)
    for r in range(n):
        prev = O
        for t in range(STEPS):
            probs = [0.6, 0.4, 0.0] if prev == O else [0.4, 0.2, 0.4]
            prev = tags[r, t] = rng.choice(TAGS, p=probs)
            words[r, t] = (rng.integers(0, 10) + 10 * prev
                           if rng.random() < 0.8 else rng.integers(0, WORDS))
    return words, tags


params = {"trans": jnp.zeros((TAGS, TAGS)), "start": jnp.zeros(TAGS),
          "emit": jnp.zeros((WORDS, TAGS))}
tx = optax.sgd(0.2, momentum=0.9)
state = tx.init(params)
objective = jax.jit(jax.value_and_grad(nll))
rng = np.random.default_rng(9)
for it in range(100):
    loss, g = objective(params, *sample_sentences(rng))
    upd, state = tx.update(g, state)
    params = optax.apply_updates(params, upd)
    if it % 10 == 0:
        print(f"it {it:3d}  nll per sentence {loss:.4f}")
