"""Tiny amortised topic model: every document gets a Dirichlet posterior over topics."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln, digamma

RAW = """the cat sat on the mat with another cat
dogs and cats are pets people love pets
stocks fell as the market closed lower today
the bank raised rates and the market reacted
investors sold stocks and bought bonds today
a dog chased the cat across the garden
the garden has roses and tulips in spring
bonds and stocks moved with interest rates
spring flowers bloom in the quiet garden
pets need food water and a quiet home
traders watched rates while the bank waited
roses need water in spring and in summer""".split("\n")

vocab = sorted({w for line in RAW for w in line.split()})
lookup = {w: i for i, w in enumerate(vocab)}
counts = np.zeros((len(RAW), len(vocab)), np.float32)
for i, line in enumerate(RAW):
    for w in line.split():
        counts[i, lookup[w]] += 1
counts = jnp.asarray(counts)

N_TOPICS = 8
PRIOR = jnp.full((N_TOPICS,), 0.02)


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "enc_w": 0.3 * jax.random.normal(k1, (len(vocab), 24)),
        "enc_b": jnp.zeros(24),
        "out_w": 0.3 * jax.random.normal(k2, (24, N_TOPICS)),
        "out_b": 2.0 * jnp.ones(N_TOPICS),
        "topics": 0.5 * jax.random.normal(k3, (N_TOPICS, len(vocab))),
    }


def encode(p, x):
    h = jnp.tanh(x @ p["enc_w"] + p["enc_b"])
    return jax.nn.softplus(h @ p["out_w"] + p["out_b"])


def dirichlet_kl(a, b):
    a0, b0 = a.sum(-1), b.sum(-1)
    return (gammaln(a0) - gammaln(b0) - (gammaln(a) - gammaln(b)).sum(-1)
            + ((a - b) * (digamma(a) - digamma(a0)[..., None])).sum(-1))


def elbo(p, x, key):
    conc = encode(p, x)
    theta = jax.random.dirichlet(key, conc)
    log_beta = jax.nn.log_softmax(p["topics"], axis=-1)
    # log p(w | d) = logsumexp_k  log theta_k + log beta_kw
    mix = jnp.log(theta)[:, :, None] + log_beta[None]
    word_lp = jax.nn.logsumexp(mix, axis=1)
    rec = (x * word_lp).sum(-1)
    kl = dirichlet_kl(conc, PRIOR)
    return (rec - kl).mean()


opt = optax.adam(optax.cosine_decay_schedule(0.04, 50))


@jax.jit
def update(p, s, key):
    value, g = jax.value_and_grad(lambda q: -elbo(q, counts, key))(p)
    up, s = opt.update(g, s, p)
    return optax.apply_updates(p, up), s, value, optax.global_norm(g)


def perplexity(p):
    conc = encode(p, counts)
    mean = conc / conc.sum(-1, keepdims=True)
    probs = mean @ jax.nn.softmax(p["topics"], -1)
    return float(jnp.exp(-(counts * jnp.log(probs)).sum() / counts.sum()))


params = init(jax.random.PRNGKey(4))
state = opt.init(params)
for it in range(30):
    params, state, nelbo, gn = update(params, state, jax.random.PRNGKey(100 + it))
    if it % 7 == 0 or it == 29:
        print(f"it {it:3d}  -elbo {float(nelbo):9.3f}  |g| {float(gn):9.3f}  ppl {perplexity(params):7.2f}")
print("top words of topic 0:", [vocab[j] for j in np.argsort(-np.array(params["topics"][0]))[:5]])
