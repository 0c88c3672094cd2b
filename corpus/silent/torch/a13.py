"""REINFORCE with a running baseline on a contextual bandit of digit images."""
import torch
import torch.nn as nn
from sklearn.datasets import load_digits

torch.manual_seed(4)
bunch = load_digits()
X = torch.tensor(bunch.data, dtype=torch.float32) / 16
Y = torch.tensor(bunch.target)


class Policy(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_obs, 64), nn.Tanh(), nn.Linear(64, n_act))

    def forward(self, obs):
        return torch.distributions.Categorical(logits=self.net(obs))


class Agent:
    def __init__(self):
        self.policy = Policy(64, 10)
        self.opt = torch.optim.RMSprop(self.policy.parameters(), lr=4e-3)
        self.baseline = 0.0

    def update(self, obs, truth):
        dist = self.policy(obs)
        act = dist.sample()
        reward = (act == truth).float()
        adv = reward - self.baseline
        loss = -(dist.log_prob(act) * adv).mean() - 0.03 * dist.entropy().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.baseline += 0.05 * (reward.mean().item() - self.baseline)
        return loss.item(), reward.mean().item()


agent = Agent()
hist = []
for it in range(300):
    i = torch.randint(0, len(X), (128,))
    loss, rew = agent.update(X[i], Y[i])
    hist.append(rew)
    if it % 25 == 24:
        print(f"it {it + 1:3d} loss {loss:+.4f} mean reward of the last 25: {sum(hist[-25:]) / 25:.3f}")
