import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(21)
G = torch.Generator().manual_seed(21)
N_ITEMS, BUDGET = 8, 5


class Knapsack:
    """pick items one by one; items that are taken or too heavy are illegal"""

    def __init__(self, n):
        self.w = torch.randint(1, 4, (n, N_ITEMS), generator=G).float()
        self.v = torch.rand(n, N_ITEMS, generator=G)
        self.taken = torch.zeros(n, N_ITEMS, dtype=torch.bool)
        self.left = torch.full((n,), float(BUDGET))

    def legal(self):
        can = (~self.taken) & (self.w <= self.left[:, None])
        stop = torch.ones(len(can), 1, dtype=torch.bool)
        return torch.cat([can, stop], 1)

    def obs(self):
        return torch.cat([self.w / 3, self.v, self.taken.float(), self.left[:, None] / BUDGET], 1)

    def step(self, a, done):
        item = (a < N_ITEMS) & ~done
        rows = item.nonzero().squeeze(1)
        self.taken[rows, a[rows]] = True
        self.left[rows] -= self.w[rows, a[rows]]
        r = torch.zeros(len(a))
        r[rows] = self.v[rows, a[rows]]
        return r, done | (a == N_ITEMS)


net = nn.Sequential(nn.Linear(3 * N_ITEMS + 1, 64), nn.Tanh(), nn.Linear(64, N_ITEMS + 1 + 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)


def heads(obs, legal):
    out = net(obs)
    logits = out[:, :-1].masked_fill(~legal, float("-inf"))
    return torch.log_softmax(logits, 1), out[:, -1]


def entropy(logp):
    return -torch.where(logp.isinf(), torch.zeros_like(logp), logp.exp() * logp.masked_fill(logp.isinf(), 0.0)).sum(1)


def explained_variance(ret, val):
    var = ret.var() if len(ret) > 1 else torch.tensor(0.0)
    return float("nan") if var == 0 else (1 - (ret - val).var() / var).item()


def rollout(n):
    env, done, mem = Knapsack(n), torch.zeros(n, dtype=torch.bool), []
    for _ in range(BUDGET + 1):
        obs, legal = env.obs(), env.legal()
        with torch.no_grad():
            logp, _ = heads(obs, legal)
        a = Categorical(logits=logp).sample()
        r, nxt = env.step(a, done)
        mem.append((obs, legal, a, logp, r, ~done))
        done = nxt
    return [torch.stack(z) for z in zip(*mem)]


first, best = None, -float("inf")
for it in range(45):
    obs, legal, a, old, r, alive = rollout(128)
    ret = r.flip(0).cumsum(0).flip(0)
    m = alive.flatten()
    o, l, a, old, ret = obs.flatten(0, 1)[m], legal.flatten(0, 1)[m], a.flatten()[m], old.flatten(0, 1)[m], ret.flatten()[m]
    for k in range(3):
        logp, val = heads(o, l)
        lp = logp.gather(1, a[:, None]).squeeze(1)
        ratio = (lp - old.gather(1, a[:, None]).squeeze(1)).exp()
        adv = (ret - val).detach()
        adv = (adv - adv.mean()) / (adv.std() + 1e-6)
        pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        loss = pg + 0.5 * (val - ret).pow(2).mean() - 0.01 * entropy(logp).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    score = r.sum(0).mean().item()
    first = score if first is None else first
    best = max(best, score)
    if it % 9 == 0:
        last = alive[-1]
        ev_last = explained_variance(r[-1][last], torch.zeros(int(last.sum())))
        print(f"it {it:2d} value {score:.3f} best {best:.3f} entropy {entropy(logp).mean().item():.3f} ev(last move) {ev_last:.3f}")
assert best > first
