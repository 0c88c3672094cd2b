"""REINFORCE on a small corridor: walk from the middle to the right end."""
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributions import Categorical


@dataclass
class Corridor:
    size: int = 9
    limit: int = 24
    walkers: int = 32

    def reset(self):
        self.pos = torch.full((self.walkers,), self.size // 2)
        self.done = torch.zeros(self.walkers, dtype=torch.bool)
        return self.observe()

    def observe(self):
        return nn.functional.one_hot(self.pos, self.size).float()

    def step(self, action):
        move = torch.where(action == 1, 1, -1)
        slip = torch.rand(self.walkers) < 0.15
        move = torch.where(slip, -move, move)
        alive = ~self.done
        self.pos = torch.where(alive, (self.pos + move).clamp(0, self.size - 1), self.pos)
        goal, pit = self.pos == self.size - 1, self.pos == 0
        reward = torch.where(alive, -0.02 + goal.float() - pit.float(), 0.0)
        self.done = self.done | goal | pit
        return self.observe(), reward, alive


class Policy(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n, 24), nn.Tanh())
        self.actor = nn.Linear(24, 2)

    def forward(self, obs):
        return Categorical(logits=self.actor(self.body(obs)))


def rollout(env, policy):
    obs, logps, rewards, masks = env.reset(), [], [], []
    for _ in range(env.limit):
        dist = policy(obs)
        act = dist.sample()
        logps.append(dist.log_prob(act))
        obs, r, alive = env.step(act)
        rewards.append(r)
        masks.append(alive.float())
    return torch.stack(logps), torch.stack(rewards), torch.stack(masks)


def returns_to_go(rewards, gamma=0.98):
    out, acc = [], torch.zeros_like(rewards[0])
    for r in rewards.flip(0):
        acc = r + gamma * acc
        out.append(acc)
    return torch.stack(out[::-1])


torch.manual_seed(9)
env = Corridor()
policy = Policy(env.size)
optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)
for update in range(120):
    logps, rewards, masks = rollout(env, policy)
    G = returns_to_go(rewards)
    advantage = (G - (G * masks).sum() / masks.sum()) * masks
    loss = -(logps * advantage).sum() / masks.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 15 == 0 or update == 119:
        print(f"update {update:3d}  loss {loss.item():+.4f}  return {rewards.sum(0).mean().item():+.3f}")
