"""Offline RL toy: advantage weighted regression on logged point-mass episodes."""
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

SEED, BETA, GAMMA = 3, 3.0, 0.97
rng = np.random.default_rng(SEED)
torch.manual_seed(SEED)


class PointMass:
    horizon = 40

    def reset(self):
        self.p = rng.uniform(-2, 2, size=2)
        self.v = np.zeros(2)
        self.t = 0
        return self.obs()

    def obs(self):
        return np.concatenate([self.p, self.v]).astype(np.float32)

    def step(self, a):
        self.v = 0.9 * self.v + 0.2 * np.clip(a, -1, 1)
        self.p = self.p + 0.2 * self.v
        self.t += 1
        dist = np.abs(self.p).sum()
        reward = -dist + (20.0 if dist < 0.12 else 0.0)
        return self.obs(), reward, self.t >= self.horizon


def collect(n_episodes=60):
    env, buf = PointMass(), []
    for _ in range(n_episodes):
        o, done, ep = env.reset(), False, []
        while not done:
            a = -0.8 * o[:2] - 0.5 * o[2:] + rng.normal(0, 0.6, 2)
            o2, r, done = env.step(a)
            ep.append((o, a.astype(np.float32), r))
            o = o2
        g = 0.0
        for o, a, r in reversed(ep):
            g = r + GAMMA * g
            buf.append((o, a, np.float32(g)))
    obs, act, ret = map(np.stack, zip(*buf))
    return torch.from_numpy(obs), torch.from_numpy(act), torch.from_numpy(ret)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = mlp(4, 2)
        self.log_std = nn.Parameter(torch.zeros(2))

    def log_prob(self, o, a):
        return Normal(self.mu(o), self.log_std.exp(), validate_args=False).log_prob(a).sum(-1)


class AWR:
    def __init__(self):
        self.actor, self.value = Actor(), mlp(4, 1)
        self.pi_opt = torch.optim.Adam(self.actor.parameters(), 3e-4)
        self.v_opt = torch.optim.Adam(self.value.parameters(), 1e-3)

    def update(self, o, a, ret):
        v = self.value(o).squeeze(-1)
        v_loss = ((v - ret) ** 2).mean()
        self.v_opt.zero_grad(); v_loss.backward(); self.v_opt.step()

        adv = (ret - v).detach()
        w = torch.exp(adv * BETA)
        w = w / w.mean()
        pi_loss = -(w * self.actor.log_prob(o, a)).mean()
        self.pi_opt.zero_grad()
        pi_loss.backward()
        self.pi_opt.step()
        return v_loss.item(), pi_loss.item(), w.max().item()


def rollout(actor, n=3):
    tot, env = 0.0, PointMass()
    for _ in range(n):
        o, done = env.reset(), False
        while not done:
            with torch.no_grad():
                a = actor.mu(torch.from_numpy(o)[None])[0].numpy()
            o, r, done = env.step(a)
            tot += r
    return tot / n


if __name__ == "__main__":
    obs, act, ret = collect()
    ret = ret / 7.0
    print(f"transitions {len(obs)} return range {ret.min():.2f} .. {ret.max():.2f}")
    agent = AWR()
    for it in range(60):
        idx = torch.randint(0, len(obs), (64,))
        vl, pl, wm = agent.update(obs[idx], act[idx], ret[idx])
        if it % 5 == 0:
            print(f"it {it} v_loss {vl:.3f} pi_loss {pl:.3f} w_max {wm:.3g} eval {rollout(agent.actor):.1f}")
