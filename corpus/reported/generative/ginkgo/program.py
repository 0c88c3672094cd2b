import copy
import torch as T
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions.normal import Normal

T.manual_seed(2)


class CartEnv:
    """A batch of carts on a rail that should be parked at the origin."""
    max_action = 2.0

    def __init__(self, n):
        self.x, self.v = T.rand(n, 1) * 4 - 2, T.rand(n, 1) * 2 - 1

    def obs(self):
        return T.cat([self.x, self.v], dim=1)

    def step(self, u):
        cost = self.x ** 2 + 0.1 * self.v ** 2 + 0.01 * u ** 2
        self.v = (self.v + 0.25 * u).clamp(-3, 3)
        self.x = (self.x + 0.25 * self.v).clamp(-4, 4)
        return self.obs(), -0.2 * cost


class CriticNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.q = nn.Linear(3, 96), nn.Linear(96, 96), nn.Linear(96, 1)

    def forward(self, s, a):
        x = F.relu(self.fc1(T.cat([s, a], dim=1)))
        return self.q(F.relu(self.fc2(x)))


class ActorNetwork(nn.Module):
    def __init__(self, max_action):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(2, 96), nn.Linear(96, 96)
        self.mu, self.sigma = nn.Linear(96, 1), nn.Linear(96, 1)
        self.max_action, self.reparam_noise = max_action, 1e-6

    def forward(self, s):
        p = F.relu(self.fc2(F.relu(self.fc1(s))))
        return self.mu(p), T.clamp(self.sigma(p), min=self.reparam_noise, max=1)

    def sample_normal(self, s):
        mu, sigma = self.forward(s)
        probabilities = Normal(mu, sigma, validate_args=False)
        actions = probabilities.rsample()
        action = T.tanh(actions) * T.tensor(self.max_action)
        log_probs = probabilities.log_prob(actions)
        log_probs -= T.log(1 - action.pow(2) + self.reparam_noise)
        log_probs = log_probs.sum(1, keepdim=True)
        return action, log_probs


actor = ActorNetwork(CartEnv.max_action)
nn.init.uniform_(actor.sigma.weight, -0.003, 0.003)
nn.init.constant_(actor.sigma.bias, 0.1)
nn.init.uniform_(actor.mu.weight, -0.003, 0.003)
q1, q2 = CriticNetwork(), CriticNetwork()
t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
opt_a = T.optim.Adam(actor.parameters(), lr=2e-3)
opt_q = T.optim.Adam(list(q1.parameters()) + list(q2.parameters()), lr=2e-3)
gamma, tau, alpha, memory = 0.9, 0.05, 0.02, []

env = CartEnv(64)
for step in range(200):
    for _ in range(2):
        s = env.obs()
        with T.no_grad():
            a, _ = actor.sample_normal(s)
        s2, r = env.step(a)
        memory.append((s, a, r, s2))
    if step % 20 == 19:
        env = CartEnv(64)
    S, A, R, S2 = (T.cat([m[k] for m in memory]) for k in range(4))
    idx = T.randint(0, len(S), (256,))
    with T.no_grad():
        a2, lp2 = actor.sample_normal(S2[idx])
        target = R[idx] + gamma * (T.min(t1(S2[idx], a2), t2(S2[idx], a2)) - alpha * lp2)
    critic_loss = F.mse_loss(q1(S[idx], A[idx]), target) + F.mse_loss(q2(S[idx], A[idx]), target)
    opt_q.zero_grad()
    critic_loss.backward()
    opt_q.step()
    act, lp = actor.sample_normal(S[idx])
    actor_loss = (alpha * lp - T.min(q1(S[idx], act), q2(S[idx], act))).mean()
    opt_a.zero_grad()
    actor_loss.backward()
    opt_a.step()
    for net, tgt in ((q1, t1), (q2, t2)):
        for p, tp in zip(net.parameters(), tgt.parameters()):
            tp.data.mul_(1 - tau).add_(tau * p.data)
    if step % 20 == 0:
        print(f"step {step} critic {critic_loss.item():.4f} actor {actor_loss.item():.4f}")

T.manual_seed(123)
test, total = CartEnv(256), 0.0
with T.no_grad():
    for _ in range(30):
        mu, _ = actor(test.obs())
        _, r = test.step(T.tanh(mu) * test.max_action)
        total -= r.mean().item()
print("FINAL", total)
