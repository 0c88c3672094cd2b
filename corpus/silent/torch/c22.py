"""REINFORCE on a small corridor: the agent starts in the middle and the exit is on the right."""
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Corridor:
    def __init__(self, n_envs, size=9, horizon=12):
        self.n, self.size, self.horizon = n_envs, size, horizon

    def reset(self):
        self.pos = torch.full((self.n,), self.size // 2)
        self.done = torch.zeros(self.n, dtype=torch.bool)
        return self.obs()

    def obs(self):
        return nn.functional.one_hot(self.pos, self.size).float()

    def step(self, action):
        move = torch.where(action == 1, 1, -1)
        self.pos = torch.where(self.done, self.pos, (self.pos + move).clamp(0, self.size - 1))
        reached = (self.pos == self.size - 1) & ~self.done
        reward = torch.where(self.done, 0.0, torch.where(reached, 1.0, -0.05))
        self.done |= reached
        return self.obs(), reward, self.done.clone()


class Agent:
    def __init__(self, obs_dim, lr=5e-3, gamma=0.98):
        self.policy = nn.Sequential(nn.Linear(obs_dim, 32), nn.Tanh(), nn.Linear(32, 2))
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=lr)
        self.gamma = gamma

    def rollout(self, env):
        obs, logps, rews, alive = env.reset(), [], [], []
        for _ in range(env.horizon):
            dist = Categorical(logits=self.policy(obs))
            a = dist.sample()
            alive.append((~env.done).float())
            obs, r, done = env.step(a)
            logps.append(dist.log_prob(a))
            rews.append(r)
        return torch.stack(logps), torch.stack(rews), torch.stack(alive)

    def update(self, logps, rews, alive):
        returns = torch.zeros_like(rews)
        running = torch.zeros(rews.shape[1])
        for t in reversed(range(len(rews))):
            running = rews[t] + self.gamma * running
            returns[t] = running
        adv = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = (logps * adv * alive).sum() / alive.sum()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()


torch.manual_seed(12)
env = Corridor(n_envs=64)
agent = Agent(env.size)
for episode in range(120):
    logps, rews, alive = agent.rollout(env)
    loss = agent.update(logps, rews, alive)
    ret = rews.sum(0).mean().item()
    if episode % 10 == 0:
        print(f"episode {episode:3d}  loss {loss:+.4f}  mean return {ret:+.3f}")
print(f"final metric: mean return {ret:+.4f}")
