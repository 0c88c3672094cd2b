"""Soft actor-critic on a one-step reaching task (no environment needed)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

torch.manual_seed(3)
MAX_ACTION = 2.0
REPARAM_NOISE = 1e-6


class Actor(nn.Module):
    def __init__(self, n_state=4, n_action=2):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_state, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu = nn.Linear(64, n_action)
        self.log_std = nn.Linear(64, n_action)
        nn.init.uniform_(self.mu.weight, -3e-3, 3e-3)
        nn.init.uniform_(self.log_std.weight, -3e-3, 3e-3)
        nn.init.constant_(self.log_std.bias, -2.5)

    def sample(self, state):
        h = self.body(state)
        mu = self.mu(h)
        log_std = self.log_std(h).clamp(-6, 1)
        dist = Normal(mu, log_std.exp())
        raw = dist.rsample()
        action = torch.tanh(raw) * MAX_ACTION
        log_prob = dist.log_prob(raw)
        log_prob = log_prob - torch.log(1 - action.pow(2) + REPARAM_NOISE)
        return action, log_prob.sum(-1, keepdim=True)


class Critic(nn.Module):
    def __init__(self, n_state=4, n_action=2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_state + n_action, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, state, action):
        return self.net(torch.cat([state, action], -1))


goal_map = torch.randn(4, 2)
actor, critic = Actor(), Critic()
opt_a = torch.optim.Adam(actor.parameters(), lr=1e-3)
opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3)
log_alpha = torch.tensor(-4.0, requires_grad=True)
opt_t = torch.optim.Adam([log_alpha], lr=1e-3)
TARGET_ENTROPY = -2.0

for step in range(400):
    state = torch.randn(128, 4)
    goal = 1.7 * torch.tanh(state @ goal_map)
    with torch.no_grad():
        action, _ = actor.sample(state)
        action = (action + 0.4 * torch.randn_like(action)).clamp(-MAX_ACTION, MAX_ACTION)
        reward = -(action - goal).pow(2).sum(-1, keepdim=True)

    critic_loss = F.mse_loss(critic(state, action), reward)
    opt_c.zero_grad()
    critic_loss.backward()
    opt_c.step()

    new_action, log_prob = actor.sample(state)
    actor_loss = (log_alpha.exp().detach() * log_prob - critic(state, new_action)).mean()
    opt_a.zero_grad()
    actor_loss.backward()
    opt_a.step()

    alpha_loss = -(log_alpha * (log_prob.detach() + TARGET_ENTROPY)).mean()
    opt_t.zero_grad()
    alpha_loss.backward()
    opt_t.step()
    if step % 50 == 0:
        print(f"{step:4d}  critic {critic_loss.item():.4f}  actor {actor_loss.item():.4f}  "
              f"reward {reward.mean().item():.3f}  alpha {log_alpha.exp().item():.4f}")
