"""PPO update: shared-trunk actor-critic, GAE advantages, clipped policy and value losses."""
import numpy as np
import torch
from torch import nn

import stablenum_torch

OBS, ACTIONS, STEPS, ENVS = 10, 5, 16, 8
GAMMA, LAMBDA, CLIP = 0.99, 0.95, 0.2
VALUE_COEF, ENTROPY_COEF = 0.5, 0.01


def layer(n_in, n_out, gain=2 ** 0.5):
    linear = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class ActorCritic(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.trunk = nn.Sequential(layer(OBS, hidden), nn.Tanh(), layer(hidden, hidden), nn.Tanh())
        self.policy = layer(hidden, ACTIONS, gain=0.5)
        self.value = layer(hidden, 1, gain=1.0)

    def forward(self, obs):
        h = self.trunk(obs)
        return self.policy(h), self.value(h).squeeze(-1)


@torch.no_grad()
def gae(rewards, values, dones, last_value):
    """Generalised advantage estimates; dones[t] says that the episode ended after step t."""
    advantages = torch.zeros_like(rewards)
    running = torch.zeros_like(last_value)
    next_value = last_value
    for t in reversed(range(rewards.size(0))):
        alive = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * next_value * alive - values[t]
        running = delta + GAMMA * LAMBDA * alive * running
        advantages[t] = running
        next_value = values[t]
    return advantages


def policy_loss(log_prob, old_log_prob, advantages):
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(ratio, 1.0 - CLIP, 1.0 + CLIP)
    return -torch.min(ratio * advantages, clipped * advantages).mean()


def value_loss(value, old_value, returns):
    value_clipped = old_value + torch.clamp(value - old_value, -CLIP, CLIP)
    squared = (value - returns) ** 2
    squared_clipped = (value_clipped - returns) ** 2
    return 0.5 * torch.max(squared, squared_clipped).mean()


def make_rollout(seed=4):
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(STEPS, ENVS, OBS))
    actions = rng.integers(0, ACTIONS, size=(STEPS, ENVS))
    rewards = rng.normal(0.1, 1.0, size=(STEPS, ENVS))
    dones = (rng.random((STEPS, ENVS)) < 0.1).astype("float64")
    old_log_prob = np.log(1.0 / ACTIONS) + 0.3 * rng.normal(size=(STEPS, ENVS))
    values, last_value = rng.normal(size=(STEPS, ENVS)), rng.normal(size=ENVS)
    floats = [obs, rewards, dones, old_log_prob, values, last_value]
    return [torch.from_numpy(actions)] + [torch.from_numpy(a).float() for a in floats]


def program():
    torch.manual_seed(4)
    model = ActorCritic()

    def loss_fn(actions, obs, rewards, dones, old_log_prob, values, last_value):
        advantages = gae(rewards, values, dones, last_value)
        returns = (advantages + values).flatten()
        advantages = advantages.flatten()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

        logits, value = model(obs.flatten(0, 1))
        log_probs = torch.log_softmax(logits, dim=-1)
        log_prob = log_probs.gather(1, actions.flatten()[:, None]).squeeze(1)
        entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()

        pg = policy_loss(log_prob, old_log_prob.flatten(), advantages)
        vf = value_loss(value, values.flatten(), returns)
        return pg + VALUE_COEF * vf - ENTROPY_COEF * entropy

    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
    return stablenum_torch.program(loss_fn, *make_rollout(), model=model, optimizer=optimizer)
