import torch
import torch.nn as nn
from torch.distributions import Normal

torch.manual_seed(0)


class GaussianPolicy(nn.Module):
    def __init__(self, state_dim, action_dim, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(state_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean_head = nn.Linear(hidden, action_dim)
        self.logvar_head = nn.Linear(hidden, action_dim)

    def forward(self, x):
        h = self.body(x)
        mean = self.mean_head(h)
        logvar = self.logvar_head(h).clamp(-4.0, 1.0)
        return Normal(mean, torch.exp(0.5 * logvar))


def rollout(policy, n, horizon=6):
    """Double integrator, quadratic cost, the cost-to-go is used as the (negative) return."""
    x = torch.randn(n, 2)
    logps, costs = [], []
    for _ in range(horizon):
        d = policy(x)
        a = d.sample()
        logps.append(d.log_prob(a).sum(-1))
        with torch.no_grad():
            u = a.clamp(-2.0, 2.0)
            x = torch.stack([x[:, 0] + 0.4 * x[:, 1], x[:, 1] + 0.4 * u[:, 0]], dim=1)
            costs.append(x[:, 0] ** 2 + 0.3 * x[:, 1] ** 2 + 0.05 * u[:, 0] ** 2)
    return torch.stack(logps), torch.stack(costs)


@torch.no_grad()
def evaluate(policy, horizon=12):
    g = torch.Generator().manual_seed(77)
    x = torch.randn(512, 2, generator=g)
    total = torch.zeros(512)
    for _ in range(horizon):
        u = policy(x).mean.clamp(-2.0, 2.0)
        x = torch.stack([x[:, 0] + 0.4 * x[:, 1], x[:, 1] + 0.4 * u[:, 0]], dim=1)
        total += x[:, 0] ** 2 + 0.3 * x[:, 1] ** 2 + 0.05 * u[:, 0] ** 2
    return (total / horizon).clamp(max=100.0).mean().item()


policy = GaussianPolicy(2, 1)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
print("before training", evaluate(policy))
for episode in range(300):
    logps, costs = rollout(policy, 512)
    returns = -costs.flip(0).cumsum(0).flip(0)
    adv = returns - returns.mean(dim=1, keepdim=True)
    adv = adv / (adv.std() + 1e-6)
    loss = -(logps * adv).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 30 == 0:
        print(f"episode {episode}  loss {loss.item():+.4f}  cost {costs.mean().item():.3f}")

print("FINAL", evaluate(policy))
