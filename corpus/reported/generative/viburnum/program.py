"""Constrained policy optimisation (Lagrangian): maximise reward subject to an average-cost limit."""
from typing import NamedTuple
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

HORIZON, LIMIT = 20, 0.12


class Policy(nn.Module):
    @nn.compact
    def __call__(self, s):
        h = nn.tanh(nn.Dense(48)(s))
        h = nn.tanh(nn.Dense(48)(h))
        return nn.tanh(nn.Dense(2, kernel_init=nn.initializers.normal(0.01))(h))


class Hazard(NamedTuple):
    centre: jnp.ndarray
    radius: float


HAZARD = Hazard(jnp.array([0.0, 0.0]), 0.9)
GOAL = jnp.array([2.0, 0.0])
policy = Policy()


def rollout(theta, key, s0):
    """Differentiable point robot; cost = soft indicator of being inside the hazard."""
    def step(s, k):
        a = policy.apply(theta, s) + 0.1 * jax.random.normal(k, s.shape)
        s = s + 0.25 * a
        dist = jnp.linalg.norm(s - GOAL + 1e-8, axis=-1)
        inside = jax.nn.sigmoid(12.0 * (HAZARD.radius - jnp.sqrt(jnp.sum((s - HAZARD.centre) ** 2, -1) + 1e-8)))
        return s, (-dist, inside)
    _, (r, c) = jax.lax.scan(step, s0, jax.random.split(key, HORIZON))
    return r.mean(), c.sum(0).mean()


def starts(key, n):
    return jnp.array([-2.0, 0.0]) + 0.3 * jax.random.normal(key, (n, 2))


def lagrangian(params, key):
    k1, k2 = jax.random.split(key)
    reward, cost = rollout(params["theta"], k1, starts(k2, 128))
    return -reward + params["lam"] * (cost - LIMIT), (reward, cost)


params = {"theta": policy.init(jax.random.PRNGKey(0), jnp.zeros((1, 2))), "lam": jnp.zeros(())}
tx = optax.multi_transform(
    {"min": optax.adam(3e-3), "max": optax.chain(optax.sgd(0.015), optax.scale(-1.0))},
    {"theta": "min", "lam": "max"},
)
state = tx.init(params)


@jax.jit
def update(params, state, key):
    (loss, (reward, cost)), g = jax.value_and_grad(lagrangian, has_aux=True)(params, key)
    up, state = tx.update(g, state, params)
    params = optax.apply_updates(params, up)
    params["lam"] = jnp.maximum(params["lam"], 0.0)
    return params, state, loss, reward, cost


key = jax.random.PRNGKey(1)
for it in range(400):
    key, k = jax.random.split(key)
    params, state, loss, reward, cost = update(params, state, k)
    if it % 40 == 0:
        print(f"it {it:3d} loss {float(loss):+.4f} EpReward {float(reward):+.4f} EpCost {float(cost):.4f} "
              f"lambda {float(params['lam']):.4f}")

reward, cost = rollout(params["theta"], jax.random.PRNGKey(5), starts(jax.random.PRNGKey(6), 1024))
print("reward", float(reward), "cost", float(cost), "limit", LIMIT)
print("FINAL", float(-reward + 5.0 * jnp.maximum(cost - LIMIT, 0.0)))
