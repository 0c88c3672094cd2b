import numpy as np
import torch
import torch.nn as nn

SEED = 11
np.random.seed(SEED)
torch.manual_seed(SEED)


class Corridor:
    """walk right to get out; nothing is paid before the exit"""

    def __init__(self, n=16):
        self.n = n

    def reset(self):
        self.pos, self.t = 0, 0
        return self.obs()

    def obs(self):
        o = np.zeros(self.n, dtype=np.float32)
        o[self.pos] = 1.0
        return o

    def step(self, a):
        self.t += 1
        self.pos = max(0, self.pos - 1) if a == 0 else min(self.n - 1, self.pos + 1)
        out = self.pos == self.n - 1
        return self.obs(), float(out), out or self.t >= 40


class PER:
    def __init__(self, size, alpha=0.6, beta=0.4):
        self.size, self.alpha, self.beta = size, alpha, beta
        self.data, self.prio, self.ptr = [], np.zeros(size), 0

    def push(self, tr):
        p = self.prio[: len(self.data)].max() if self.data else 1.0
        if len(self.data) < self.size:
            self.data.append(tr)
        else:
            self.data[self.ptr] = tr
        self.prio[self.ptr] = p if p > 0 else 1.0
        self.ptr = (self.ptr + 1) % self.size

    def sample(self, bs, n_recent=6):
        n = len(self.data)
        probs = self.prio[:n] ** self.alpha
        probs = probs / probs.sum()
        idx = np.random.choice(n, bs - n_recent, p=probs)
        recent = (self.ptr - 1 - np.arange(n_recent)) % n
        idx = np.concatenate([idx, recent])
        w = (n * probs[idx]) ** (-self.beta)
        w = w / w.max()
        s, a, r, s2, d = map(np.array, zip(*[self.data[i] for i in idx]))
        return idx, (torch.tensor(s), torch.tensor(a), torch.tensor(r, dtype=torch.float32),
                     torch.tensor(s2), torch.tensor(d, dtype=torch.float32)), torch.tensor(w, dtype=torch.float32)

    def update(self, idx, td):
        self.prio[idx] = np.abs(td)


def build(n):
    net = nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Linear(32, 2))
    nn.init.zeros_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    return net


env = Corridor()
q, q_targ = build(env.n), build(env.n)
q_targ.load_state_dict(q.state_dict())
opt = torch.optim.RMSprop(q.parameters(), lr=1e-3)
mem = PER(2000)
gamma, n_upd, s = 0.97, 0, env.reset()

for t in range(320):
    eps = max(0.1, 1.0 - t / 500)
    with torch.no_grad():
        a = np.random.randint(2) if np.random.rand() < eps else int(q(torch.tensor(s)).argmax())
    s2, r, done = env.step(a)
    mem.push((s, a, r, s2, done))
    s = env.reset() if done else s2
    if t < 120 or t % 4:
        continue
    idx, (bs, ba, br, bs2, bd), w = mem.sample(32)
    with torch.no_grad():
        y = br + gamma * (1 - bd) * q_targ(bs2).max(1).values
    td = y - q(bs).gather(1, ba[:, None]).squeeze(1)
    loss = (w * td.pow(2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    mem.update(idx, td.detach().numpy())
    if n_upd % 10 == 0:
        q_targ.load_state_dict(q.state_dict())
    print(f"update {n_upd:2d}  loss {loss.item():.5f}  w_min {w.min().item():.3f}  q(start) {q(torch.eye(env.n)[0]).max().item():.4f}")
    n_upd += 1
