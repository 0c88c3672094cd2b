"""scVI-flavoured autoencoder: negative binomial likelihood on droplet counts."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.special import gammaln

GENES, LATENT, HID = 50, 4, 48


def simulate(n, rng):
    prog = rng.gamma(0.6, 1.0, (3, GENES))
    kind = rng.integers(0, 3, n)
    depth = rng.lognormal(0.3, 1.25, n)
    rate = depth[:, None] * prog[kind] / prog.sum(1).mean() * 8
    return rng.poisson(rate).astype(np.float32), kind


def dense(key, i, o):
    return {"w": jax.random.normal(key, (i, o)) / np.sqrt(i), "b": jnp.zeros(o)}


def lin(p, x):
    return x @ p["w"] + p["b"]


def encode(params, x):
    h = jax.nn.relu(lin(params["e1"], jnp.log1p(x)))
    return lin(params["mu"], h), jnp.clip(lin(params["lv"], h), -8.0, 4.0)


@jax.checkpoint
def decode(params, z, log_lib):
    h = jax.nn.relu(lin(params["d1"], z))
    frac = jax.nn.softmax(lin(params["d2"], h))
    return jnp.exp(log_lib)[:, None] * frac


def nb_log_prob(x, mean, theta):
    lt = jnp.log(theta + mean)
    out = theta * (jnp.log(theta) - lt) + x * (jnp.log(mean) - lt)
    return out + gammaln(x + theta) - gammaln(theta) - gammaln(x + 1.0)


def neg_elbo(params, x, key, beta):
    mu, lv = encode(params, x)
    z = mu + jnp.exp(0.5 * lv) * jax.random.normal(key, mu.shape)
    log_lib = jnp.log(x.sum(axis=1))
    mean = decode(params, z, log_lib)
    rec = nb_log_prob(x, mean, jnp.exp(params["log_theta"])).sum(1)
    kl = 0.5 * jnp.sum(mu ** 2 + jnp.exp(lv) - lv - 1.0, axis=1)
    return jnp.mean(beta * kl - rec)


rng = np.random.default_rng(13)
counts, kind = simulate(1500, rng)
print("cells", counts.shape, "median depth", np.median(counts.sum(1)), "sparsity", (counts == 0).mean())
k = jax.random.split(jax.random.PRNGKey(0), 6)
params = {"e1": dense(k[0], GENES, HID), "mu": dense(k[1], HID, LATENT), "lv": dense(k[2], HID, LATENT),
          "d1": dense(k[3], LATENT, HID), "d2": dense(k[4], HID, GENES), "log_theta": jnp.zeros(GENES)}
tx = optax.adam(optax.linear_schedule(3e-3, 5e-4, 150))
opt_state = tx.init(params)


@jax.jit
def step(params, opt_state, x, key, beta):
    loss, g = jax.value_and_grad(neg_elbo)(params, x, key, beta)
    upd, opt_state = tx.update(g, opt_state)
    return optax.apply_updates(params, upd), opt_state, loss


key = k[5]
for it in range(150):
    key, sub = jax.random.split(key)
    batch = counts[rng.integers(0, len(counts), 32)]
    params, opt_state, loss = step(params, opt_state, batch, sub, min(1.0, it / 50))
    if it % 6 == 0:
        print(f"iteration {it} -elbo {loss:.3f}")
