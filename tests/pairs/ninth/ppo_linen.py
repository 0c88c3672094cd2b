"""One PPO update of a tanh-squashed Gaussian policy: torch.distributions and loops, flax.linen and scan.

The encoder is trained by the critic alone. The advantages are computed from the values of the update itself.
"""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch.distributions import Normal

import stablenum_jax
import stablenum_torch

STEPS, ENVS, OBS, ACTIONS, WIDTH = 10, 4, 7, 3, 24
GAMMA, LAMBDA, CLIP, VF_COEF, ENT_COEF = 0.97, 0.9, 0.2, 0.5, 0.01
LR, EPS, MAX_NORM = 3e-4, 1e-5, 0.5


def make_rollout():
    rng = np.random.default_rng(29)
    obs = rng.normal(size=(STEPS, ENVS, OBS))
    last_obs = rng.normal(size=(ENVS, OBS))
    raw = 0.7 * rng.normal(size=(STEPS, ENVS, ACTIONS))
    density = -0.5 * (raw / 0.7) ** 2 - np.log(0.7) - 0.5 * np.log(2 * np.pi)
    old_log_probs = np.sum(density - np.log(1 - np.tanh(raw) ** 2), axis=-1)
    old_log_probs += 0.2 * rng.normal(size=(STEPS, ENVS))
    rewards = rng.normal(size=(STEPS, ENVS)) + 0.5
    dones = rng.random((STEPS, ENVS)) < 0.2
    old_values = 0.3 * rng.normal(size=(STEPS, ENVS))
    arrays = (obs, last_obs, raw, old_log_probs, rewards, dones, old_values)
    return [a.astype(np.float32) for a in arrays]


# ------------------------------------------------------------- PyTorch


class ActorCritic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(OBS, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh())
        self.actor = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, ACTIONS)
        )
        self.critic = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
        )
        self.log_std = torch.nn.Parameter(torch.full((ACTIONS,), -0.5))

    def policy(self, features):
        mean = self.actor(features.detach())
        return Normal(mean, self.log_std.exp().expand_as(mean))

    def value(self, features):
        return self.critic(features).squeeze(-1)


def squashed_log_prob(dist, raw):
    correction = 2.0 * (math.log(2.0) - raw - F.softplus(-2.0 * raw))
    return (dist.log_prob(raw) - correction).sum(-1)


def compute_gae(rewards, values, dones, last_value):
    advantages = []
    running = torch.zeros_like(last_value)
    next_value = last_value
    for t in reversed(range(STEPS)):
        alive = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * next_value * alive - values[t]
        running = delta + GAMMA * LAMBDA * alive * running
        advantages.insert(0, running)
        next_value = values[t]
    return torch.stack(advantages)


# ------------------------------------------------------------- JAX


class Agent(nn.Module):
    @nn.compact
    def __call__(self, obs):
        x = nn.Dense(WIDTH, name="encoder")(obs)
        x = nn.tanh(nn.LayerNorm(epsilon=1e-5, name="encoder_norm")(x))
        detached = jax.lax.stop_gradient(x)
        hidden = nn.tanh(nn.Dense(16, name="actor_hidden")(detached))
        mean = nn.Dense(ACTIONS, name="actor_mean")(hidden)
        log_std = self.param("log_std", nn.initializers.constant(-0.5), (ACTIONS,))
        hidden = nn.tanh(nn.Dense(20, name="critic_hidden")(x))
        value = nn.Dense(1, name="critic_value")(hidden)
        return mean, log_std, jnp.squeeze(value, axis=-1)


def log_prob(mean, log_std, raw):
    scaled = (raw - mean) * jnp.exp(-log_std)
    gaussian = -0.5 * jnp.square(scaled) - log_std - 0.5 * jnp.log(2.0 * jnp.pi)
    squash = jnp.log1p(-jnp.square(jnp.tanh(raw)))
    return jnp.sum(gaussian - squash, axis=-1)


def gae(rewards, values, dones, last_value):
    following = jnp.concatenate([values[1:], last_value[None]])
    live = 1.0 - dones
    deltas = rewards + GAMMA * following * live - values

    def step(carry, inputs):
        delta, alive = inputs
        carry = delta + GAMMA * LAMBDA * alive * carry
        return carry, carry

    _, advantages = jax.lax.scan(step, jnp.zeros_like(last_value), (deltas, live), reverse=True)
    return advantages


def ppo_loss(apply, params, obs, last_obs, raw, old_log_probs, rewards, dones, old_values):
    mean, log_std, values = apply({"params": params}, obs)
    _, _, last_value = apply({"params": params}, last_obs)
    advantages = jax.lax.stop_gradient(gae(rewards, values, dones, last_value))
    returns = advantages + jax.lax.stop_gradient(values)
    advantages = (advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)

    ratio = jnp.exp(log_prob(mean, log_std, raw) - old_log_probs)
    clipped = jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages))

    near = old_values + jnp.clip(values - old_values, -CLIP, CLIP)
    value_loss = 0.5 * jnp.mean(jnp.maximum((values - returns) ** 2, (near - returns) ** 2))
    entropy = jnp.sum(log_std + 0.5 * jnp.log(2.0 * jnp.pi * jnp.e))
    return policy_loss + VF_COEF * value_loss - ENT_COEF * entropy


def clip_grads(max_norm):
    """torch.nn.utils.clip_grad_norm_"""

    def update(grads, state, params=None):
        factor = jnp.minimum(max_norm / (optax.global_norm(grads) + 1e-6), 1.0)
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer():
    return optax.chain(clip_grads(MAX_NORM), optax.adam(LR, eps=EPS))


# ------------------------------------------------------------- the pair


def left():
    torch.manual_seed(0)
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=EPS)

    def clip_gradients(*_):
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    optimizer.register_step_pre_hook(clip_gradients)

    def loss_fn(obs, last_obs, raw, old_log_probs, rewards, dones, old_values):
        features = model.encoder(obs)
        values = model.value(features)
        dist = model.policy(features)
        with torch.no_grad():
            last_value = model.value(model.encoder(last_obs))
            advantages = compute_gae(rewards, values, dones, last_value)
            returns = advantages + values
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        ratio = (squashed_log_prob(dist, raw) - old_log_probs).exp()
        surrogate = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        values_clipped = old_values + (values - old_values).clamp(-CLIP, CLIP)
        v_loss = 0.5 * torch.max((values - returns) ** 2, (values_clipped - returns) ** 2).mean()
        entropy = dist.entropy().sum(-1).mean()
        return -surrogate.mean() + VF_COEF * v_loss - ENT_COEF * entropy

    return stablenum_torch.program(
        loss_fn, *map(torch.tensor, make_rollout()), model=model, optimizer=optimizer
    )


def right():
    agent = Agent()
    rollout = [jnp.asarray(a) for a in make_rollout()]
    params = agent.init(jax.random.key(0), rollout[0])["params"]

    def loss_fn(params, *rollout):
        return ppo_loss(agent.apply, params, *rollout)

    return stablenum_jax.program(loss_fn, params, *rollout, optimizer=make_optimizer())
