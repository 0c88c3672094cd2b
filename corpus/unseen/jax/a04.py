# Left-to-right hidden Markov model trained by gradient on the forward likelihood.
import jax, jax.numpy as jnp
from jax import lax, random
from jax.nn import logsumexp, log_sigmoid

S, T, B = 5, 20, 32


def sample_batch(key):
    k1, k2 = random.split(key)
    stay = random.bernoulli(k1, 0.75, (B, T))
    states = jnp.clip(jnp.cumsum(~stay, axis=1), 0, S - 1)
    means = jnp.array([-2.0, 1.5, 0.0, 3.0, -1.0])
    return means[states] + 0.4 * random.normal(k2, (B, T))


def log_transitions(stay_logits):
    stay = log_sigmoid(stay_logits)
    move = log_sigmoid(-stay_logits)
    A = jnp.full((S, S), -jnp.inf)
    A = A.at[jnp.arange(S), jnp.arange(S)].set(stay)
    A = A.at[jnp.arange(S - 1), jnp.arange(1, S)].set(move[:-1])
    return A.at[S - 1, S - 1].set(0.0)


def emission(params, x):
    sd = jnp.exp(params["log_sd"])
    return -0.5 * ((x - params["mu"]) / sd) ** 2 - params["log_sd"] - 0.9189385


def neg_log_lik(params, xs):
    A = log_transitions(params["stay"])
    alpha0 = jnp.where(jnp.arange(S) == 0, 0.0, -jnp.inf) + emission(params, xs[0])

    def forward(alpha, x):
        alpha = logsumexp(alpha[:, None] + A, axis=0) + emission(params, x)
        return alpha, None

    alpha, _ = lax.scan(forward, alpha0, xs[1:])
    return -logsumexp(alpha)


def batch_loss(params, batch):
    return jnp.mean(jax.vmap(neg_log_lik, (None, 0))(params, batch)) / T


@jax.jit
def sgd(params, batch, lr):
    val, g = jax.value_and_grad(batch_loss)(params, batch)
    return jax.tree.map(lambda p, d: p - lr * d, params, g), val


key = random.PRNGKey(7)
params = {"stay": jnp.zeros(S), "mu": jnp.linspace(-1.0, 1.0, S), "log_sd": jnp.zeros(S)}
for i in range(100):
    key, k = random.split(key)
    params, nll = sgd(params, sample_batch(k), 0.1)
    if i % 10 == 0:
        print("iter", i, "nll/frame", nll)
print(params["mu"])
