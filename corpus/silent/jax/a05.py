"""VAE on digits; the weight of the KL term is raised during training."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

STEPS, BATCH, LATENT = 280, 128, 6


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        h = nn.gelu(nn.Dense(128)(x))
        mu, logvar = jnp.split(nn.Dense(2 * LATENT)(h), 2, axis=-1)
        z = mu + jnp.exp(0.5 * logvar) * jax.random.normal(key, mu.shape)
        h = nn.gelu(nn.Dense(128)(z))
        return nn.Dense(x.shape[-1])(h), mu, logvar


model = VAE()
x_all = jnp.asarray(load_digits().data / 16.0, jnp.float32)
params = model.init(jax.random.PRNGKey(0), x_all[:1], jax.random.PRNGKey(1))
tx = optax.adam(3e-3)
opt = tx.init(params)


def elbo(params, x, key, beta):
    logits, mu, logvar = model.apply(params, x, key)
    rec = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1).mean()
    kl = 0.5 * (jnp.exp(logvar) + mu ** 2 - 1.0 - logvar).sum(-1).mean()
    return rec + beta * kl, (rec, kl)


@jax.jit
def step(params, opt, x, key, beta):
    (loss, parts), g = jax.value_and_grad(elbo, has_aux=True)(params, x, key, beta)
    up, opt = tx.update(g, opt)
    return optax.apply_updates(params, up), opt, loss, parts


rng = np.random.default_rng(0)
for t in range(STEPS):
    beta = min(1.0, max(0.0, (t - 60) / 180))
    idx = rng.integers(0, len(x_all), BATCH)
    params, opt, loss, (rec, kl) = step(params, opt, x_all[idx], jax.random.PRNGKey(100 + t), beta)
    if t % 20 == 0 or t == STEPS - 1:
        print(f"{t:4d} beta {beta:.2f} loss {float(loss):7.3f} rec {float(rec):7.3f} kl {float(kl):7.3f}")
