"""Contrastive sentence embeddings on a bag of topic words."""
import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCAB, MAX_WORDS, DIM, OUT, TEMP = 500, 8, 48, 32, 0.1
rng = np.random.default_rng(1)
topics = rng.dirichlet(np.ones(VOCAB) * 0.02, size=60)


def sentence(topic):
    words = rng.choice(np.arange(1, VOCAB), size=MAX_WORDS, p=topics[topic][1:] / topics[topic][1:].sum())
    length = rng.integers(3, MAX_WORDS + 1)
    words[length:] = 0
    words[words > 485] = 0
    return words


def views(n, replace):
    t = rng.choice(60, size=n, replace=replace)
    a = np.stack([sentence(k) for k in t])
    b = np.stack([sentence(k) for k in t])
    return jnp.asarray(a), jnp.asarray(b)


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "emb": jax.random.normal(k1, (VOCAB, DIM)),
        "w1": jax.random.normal(k2, (DIM, DIM)) / np.sqrt(DIM),
        "w2": jax.random.normal(k3, (DIM, OUT)) / np.sqrt(DIM),
    }


def l2_normalize(x):
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return jnp.where(norm > 0, x / norm, 0.0)


def encode(params, ids):
    mask = (ids > 0)[..., None]
    words = params["emb"][ids] * mask
    words = l2_normalize(words)
    pooled = words.sum(1) / jnp.maximum(mask.sum(1), 1)
    z = jnp.tanh(pooled @ params["w1"]) @ params["w2"]
    return l2_normalize(z)


def nt_xent(params, a, b):
    za, zb = encode(params, a), encode(params, b)
    sim = za @ zb.T / TEMP
    target = jnp.arange(len(a))
    ce = optax.softmax_cross_entropy_with_integer_labels
    return 0.5 * (ce(sim, target).mean() + ce(sim.T, target).mean())


params = init(jax.random.PRNGKey(0))
opt = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
opt_state = opt.init(params)


@jax.jit
def train_step(params, opt_state, a, b):
    loss, grads = jax.value_and_grad(nt_xent)(params, a, b)
    updates, opt_state = opt.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


test_a, test_b = views(60, False)
for step in range(300):
    a, b = views(40, False)
    params, opt_state, loss = train_step(params, opt_state, a, b)
    if step % 30 == 0:
        print(f"step {step} loss {float(loss):.4f}")

print("FINAL", float(nt_xent(params, test_a, test_b)))
