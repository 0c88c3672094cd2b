"""One-step soft actor-critic on a reaching task; the torque limit is 2.0."""
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

MAX_ACTION = 2.0
ALPHA = 0.05


class Actor(nn.Module):
    act_dim: int

    @nn.compact
    def __call__(self, obs):
        h = nn.tanh(nn.Dense(32)(obs))
        h = nn.tanh(nn.Dense(32)(h))
        mu = nn.Dense(self.act_dim)(h)
        log_std = jnp.clip(nn.Dense(self.act_dim)(h), -5.0, 1.0)
        return mu, log_std


def reward(obs, action):
    goal = 1.5 * jnp.sin(obs[:, :2])
    return -jnp.sum((action - goal) ** 2, axis=-1)


actor = Actor(act_dim=2)


def sample(params, obs, key):
    mu, log_std = actor.apply(params, obs)
    eps = jax.random.normal(key, mu.shape)
    pre = mu + jnp.exp(log_std) * eps
    action = jnp.tanh(pre) * MAX_ACTION
    logp = -0.5 * eps**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    logp = logp - jnp.log(1.0 - action**2 + 1e-6)
    return action, logp.sum(axis=-1)


def actor_loss(params, obs, key):
    action, logp = sample(params, obs, key)
    return jnp.mean(ALPHA * logp - reward(obs, action))


key = jax.random.PRNGKey(3)
key, sub = jax.random.split(key)
params = actor.init(sub, jnp.zeros((1, 4)))
tx = optax.adam(3e-3)
opt_state = tx.init(params)


@jax.jit
def update(params, opt_state, obs, key):
    loss, grads = jax.value_and_grad(actor_loss)(params, obs, key)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


for it in range(201):
    key, k_obs, k_act = jax.random.split(key, 3)
    obs = jax.random.normal(k_obs, (64, 4))
    params, opt_state, loss = update(params, opt_state, obs, k_act)
    if it % 25 == 0:
        print(f"iter {it:4d}  actor loss {float(loss):.4f}")
