"""Soft actor-critic, point-mass task, actions in [-2, 2]."""
import copy
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Normal


@dataclass
class Cfg:
    seed: int = 3
    max_action: float = 2.0
    gamma: float = 0.98
    tau: float = 0.01
    alpha: float = 0.1
    lr: float = 1e-3
    batch: int = 64
    warmup: int = 150
    steps: int = 600
    reparam_noise: float = 1e-6


class PointMass:
    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.s = self.rng.uniform(-1, 1, 2).astype(np.float32)
        self.t = 0
        return self.s.copy()

    def step(self, a):
        x, v = self.s
        v = np.clip(v + 0.1 * float(a), -2, 2)
        x = np.clip(x + 0.1 * v, -4, 4)
        self.s = np.array([x, v], dtype=np.float32)
        self.t += 1
        return self.s.copy(), -(x * x + 0.1 * v * v), self.t >= 50


class Actor(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.body = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.mu, self.log_std = nn.Linear(64, 1), nn.Linear(64, 1)

    def sample(self, s):
        h = self.body(s)
        dist = Normal(self.mu(h), self.log_std(h).clamp(-5, 1).exp())
        raw = dist.rsample()
        action = torch.tanh(raw) * self.cfg.max_action
        log_prob = dist.log_prob(raw)
        log_prob = log_prob - torch.log(1 - action.pow(2) + self.cfg.reparam_noise)
        return action, log_prob.sum(1, keepdim=True)


def critic():
    return nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def train(cfg):
    torch.manual_seed(cfg.seed)
    rng = np.random.default_rng(cfg.seed)
    env, actor = PointMass(rng), Actor(cfg)
    q1, q2 = critic(), critic()
    t1, t2 = copy.deepcopy(q1), copy.deepcopy(q2)
    pi_opt = torch.optim.Adam(actor.parameters(), lr=cfg.lr)
    q_opt = torch.optim.Adam([*q1.parameters(), *q2.parameters()], lr=cfg.lr)
    buf, s, ret = deque(maxlen=5000), env.reset(), 0.0
    for step in range(cfg.steps):
        if step < cfg.warmup:
            a = rng.uniform(-cfg.max_action, cfg.max_action)
        else:
            with torch.no_grad():
                a = actor.sample(torch.from_numpy(s)[None])[0].item()
        s2, r, done = env.step(a)
        buf.append((s, [a], [r], s2))
        ret += r
        s = s2
        if done:
            print(f"step {step} return {ret:.2f}")
            s, ret = env.reset(), 0.0
        if step < cfg.warmup:
            continue
        idx = rng.integers(len(buf), size=cfg.batch)
        S, A, R, S2 = (torch.tensor(np.array(c), dtype=torch.float32) for c in zip(*[buf[i] for i in idx]))
        with torch.no_grad():
            a2, lp2 = actor.sample(S2)
            sa2 = torch.cat([S2, a2], 1)
            target = R + cfg.gamma * (torch.min(t1(sa2), t2(sa2)) - cfg.alpha * lp2)
        sa = torch.cat([S, A], 1)
        q_loss = ((q1(sa) - target) ** 2).mean() + ((q2(sa) - target) ** 2).mean()
        q_opt.zero_grad(); q_loss.backward(); q_opt.step()
        a_new, lp = actor.sample(S)
        sa = torch.cat([S, a_new], 1)
        pi_loss = (cfg.alpha * lp - torch.min(q1(sa), q2(sa))).mean()
        pi_opt.zero_grad(); pi_loss.backward(); pi_opt.step()
        with torch.no_grad():
            for src, dst in ((q1, t1), (q2, t2)):
                for p, tp in zip(src.parameters(), dst.parameters()):
                    tp.lerp_(p, cfg.tau)
        if step % 50 == 0:
            print(f"   {step}: q {q_loss.item():.3f} pi {pi_loss.item():.3f}")


if __name__ == "__main__":
    train(Cfg())
