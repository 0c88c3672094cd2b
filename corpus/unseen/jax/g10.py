"""Wind-direction regression with a von Mises likelihood."""
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.scipy.special import i0


class DirectionNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.silu(nn.Dense(48)(x))
        h = nn.silu(nn.Dense(48)(h))
        sin_cos = nn.Dense(2)(h)
        mu = jnp.arctan2(sin_cos[:, 0], sin_cos[:, 1])
        kappa = nn.softplus(nn.Dense(1)(h)[:, 0] + 1.0)
        return mu, kappa


def von_mises_nll(mu, kappa, theta):
    log_norm = jnp.log(2.0 * jnp.pi * i0(kappa))
    return log_norm - kappa * jnp.cos(theta - mu)


def make_data(n=1024):
    rng = np.random.default_rng(8)
    x = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
    clean = 1.2 * x[:, 0] + 0.8 * x[:, 1] * x[:, 2]
    # the anemometer is very precise in strong wind (third column)
    sigma = np.where(x[:, 2] > 0.0, 0.01, 0.3)
    return x, (clean + sigma * rng.normal(size=n)).astype(np.float32)


net = DirectionNet()
x, theta = make_data()
params = net.init(jax.random.PRNGKey(0), x[:2])
schedule = optax.cosine_decay_schedule(1e-2, 600)
tx = optax.adam(schedule)
state = tx.init(params)


def loss_fn(params):
    mu, kappa = net.apply(params, x)
    return von_mises_nll(mu, kappa, theta).mean(), kappa.max()


@jax.jit
def step(params, state):
    (loss, kmax), g = jax.value_and_grad(loss_fn, has_aux=True)(params)
    u, state = tx.update(g, state)
    return optax.apply_updates(params, u), state, loss, kmax


for i in range(600):
    params, state, loss, kmax = step(params, state)
    if i % 50 == 0:
        print(f"{i:4d}  nll {loss:8.4f}  largest kappa {kmax:8.2f}")
