"""PPO with GAE on a one-dimensional corridor."""
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Corridor:
    """Start near the middle; +1 at the right end, -1 at the left end, small step cost."""
    LENGTH = 9

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.pos = int(self.rng.integers(2, self.LENGTH - 2))
        return self._obs()

    def _obs(self):
        v = np.zeros(self.LENGTH, dtype=np.float32)
        v[self.pos] = 1
        return v

    def step(self, a):
        move = 1 if a == 1 else -1
        if self.rng.random() < 0.1:
            move = -move
        self.pos += move
        done = self.pos in (0, self.LENGTH - 1)
        r = -0.02 + (self.pos == self.LENGTH - 1) - (self.pos == 0)
        return self._obs(), float(r), done


class ActorCritic(nn.Module):
    def __init__(self, n_obs, n_act):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(n_obs, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, n_act), nn.Linear(32, 1)

    def forward(self, x):
        h = self.trunk(x)
        return Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def collect(env, net, episodes):
    obs, act, logp, rew, val, dones = [], [], [], [], [], []
    for _ in range(episodes):
        o, done = env.reset(), False
        while not done:
            with torch.no_grad():
                dist, v = net(torch.from_numpy(o))
                a = dist.sample()
            obs.append(o); act.append(a); logp.append(dist.log_prob(a)); val.append(v.item())
            o, r, done = env.step(a.item())
            rew.append(r); dones.append(done)
    adv, last = np.zeros(len(rew), dtype=np.float32), 0.0
    for t in reversed(range(len(rew))):
        nxt = 0.0 if dones[t] else val[t + 1]
        delta = rew[t] + 0.99 * nxt - val[t]
        last = delta + 0.99 * 0.95 * (0.0 if dones[t] else last)
        adv[t] = last
    adv = torch.from_numpy(adv)
    return (torch.tensor(np.array(obs)), torch.stack(act), torch.stack(logp), adv, adv + torch.tensor(val)), sum(rew) / episodes


def update(net, opt, batch, epochs=4, minibatch=32, clip=0.2):
    obs, act, old_logp, adv_all, ret = batch
    for _ in range(epochs):
        perm = torch.randperm(len(obs))
        for start in range(0, len(obs), minibatch):
            mb = perm[start:start + minibatch]
            adv = adv_all[mb]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            dist, v = net(obs[mb])
            ratio = (dist.log_prob(act[mb]) - old_logp[mb]).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv).mean()
            loss = pg + 0.5 * (v - ret[mb]).pow(2).mean() - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()


def main(seed=0):
    torch.manual_seed(seed)
    env, net = Corridor(seed), ActorCritic(Corridor.LENGTH, 2)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for it in range(40):
        batch, ret = collect(env, net, episodes=8)
        update(net, opt, batch)
        print(f"iter {it:2d} steps {len(batch[0]):4d} return {ret:.3f}")


if __name__ == "__main__":
    main()
