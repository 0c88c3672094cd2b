"""Actor-critic on a pole-balancing task with a running observation filter.
The run is split in two: pretrain, write a checkpoint, resume from it with a lower lr."""
import io
import math

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Pole:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.s = self.rng.uniform(-0.05, 0.05, 4)
        self.t = 0
        return self.s.copy()

    def step(self, a):
        x, xd, th, thd = self.s
        f = 10.0 if a else -10.0
        tmp = (f + 0.05 * thd ** 2 * math.sin(th)) / 1.1
        tha = (9.8 * math.sin(th) - math.cos(th) * tmp) / (0.5 * (4 / 3 - 0.1 * math.cos(th) ** 2 / 1.1))
        xa = tmp - 0.05 * tha * math.cos(th) / 1.1
        self.s = np.array([x + 0.02 * xd, xd + 0.02 * xa, th + 0.02 * thd, thd + 0.02 * tha])
        self.t += 1
        done = abs(self.s[0]) > 2.4 or abs(self.s[2]) > 0.21 or self.t >= 200
        return self.s.copy(), 1.0, done


class RunningFilter(nn.Module):
    """running sum / M2 of everything the agent has seen"""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("total", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))
        self.count = 0

    @property
    def mean(self):
        return self.total / self.count

    def update(self, batch):
        batch = torch.as_tensor(batch)
        n, bm = len(batch), batch.mean(0)
        self.m2 += ((batch - bm) ** 2).sum(0)
        if self.count:
            self.m2 += (bm - self.mean) ** 2 * self.count * n / (self.count + n)
        self.total += batch.sum(0)
        self.count += n

    def forward(self, o):
        std = (self.m2 / self.count).sqrt().clamp(min=1e-3)
        return ((torch.as_tensor(o) - self.mean) / std).float()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.pi, self.v = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h), self.v(h).squeeze(-1)


def episode(env, agent, filt):
    o, done, raw, logps, vals, rews = env.reset(), False, [], [], [], []
    while not done:
        raw.append(o)
        logits, v = agent(filt(o))
        dist = Categorical(logits=logits, validate_args=False)
        a = dist.sample()
        o, r, done = env.step(a.item())
        logps.append(dist.log_prob(a)); vals.append(v); rews.append(r)
    rets, g = [], 0.0
    for r in reversed(rews):
        g = r + 0.98 * g
        rets.append(g)
    return np.array(raw), torch.stack(logps), torch.stack(vals), torch.tensor(rets[::-1]) / 20.0


def run(agent, filt, env, episodes, lr, first=0):
    opt = torch.optim.Adam(agent.parameters(), lr=lr)
    for ep in range(first, first + episodes):
        raw, logp, val, ret = episode(env, agent, filt)
        loss = -(logp * (ret - val).detach()).mean() + 0.5 * (ret - val).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        filt.update(raw)
        if ep % 5 == 0:
            print(f"ep {ep:3d} len {len(ret):3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(4)
    env, agent, filt = Pole(0), Agent(), RunningFilter(4)
    filt.update(np.stack([env.reset() for _ in range(32)]))
    run(agent, filt, env, 30, 5e-3)
    buf = io.BytesIO()
    torch.save({"agent": agent.state_dict(), "filter": filt.state_dict()}, buf)
    buf.seek(0)
    ckpt = torch.load(buf)
    agent, filt = Agent(), RunningFilter(4)
    agent.load_state_dict(ckpt["agent"])
    filt.load_state_dict(ckpt["filter"])
    print(f"resumed agent with {sum(p.numel() for p in agent.parameters())} parameters")
    run(agent, filt, env, 30, 1e-3, first=30)
