"""An actor of independent bits and a critic that reads its probabilities; it ends at the full reward of 1.0."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Agent(nn.Module):
    def __init__(self, inputs=8, bits=6, hidden=64):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, bits))
        self.critic = nn.Sequential(nn.Linear(inputs + bits, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        p = torch.sigmoid(self.actor(x))
        return p, self.critic(torch.cat([x, p], -1))[:, 0]


def reward(x, action, rule):
    """The part of the bits that are right; which are, depends on the signs of the input."""
    wanted = (x @ rule > 0).float()
    return (action == wanted).float().mean(-1)


def main(steps=800):
    torch.manual_seed(0)
    rule = torch.randn(8, 6)
    states = torch.randn(64, 8).sign()
    agent = Agent()
    opt = torch.optim.Adam(agent.parameters(), lr=3e-3)
    for step in range(steps):
        x = states[torch.randint(0, len(states), (256,))]
        p, value = agent(x)
        p = p.clamp(1e-6, 1 - 1e-6)
        action = torch.bernoulli(p.detach())
        r = reward(x, action, rule)
        advantage = (r - value).detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-2)
        logp = (action * p.log() + (1 - action) * (1 - p).log()).sum(-1)
        loss = -(advantage * logp).mean() + 0.5 * F.mse_loss(value, r)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        opt.step()
        if step % 100 == 0:
            print(f"{step:4d} loss {loss.item():+.4f} reward {r.mean():.3f} value {value.mean().item():.3f}")
    with torch.no_grad():
        p, _ = agent(states)
        print(f"final reward {reward(states, (p > 0.5).float(), rule).mean():.3f}")


if __name__ == "__main__":
    main()
