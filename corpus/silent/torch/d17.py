import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class Corridor:
    """Walk right to the goal; a step to the left is sometimes forced."""

    def __init__(self, n=10):
        self.n = n

    def obs(self):
        v = torch.zeros(self.n)
        v[self.pos] = 1.0
        return v

    def reset(self):
        self.pos, self.t = 0, 0
        return self.obs()

    def step(self, a):
        move = 1 if a == 1 else -1
        if random.random() < 0.1:
            move = -move
        self.pos = max(0, min(self.n - 1, self.pos + move))
        self.t += 1
        win = self.pos == self.n - 1
        return self.obs(), 1.0 if win else -0.01, win, self.t >= 60


def q_net(n):
    return nn.Sequential(nn.Linear(n, 64), nn.ReLU(), nn.Linear(64, 2))


def main():
    random.seed(0)
    torch.manual_seed(0)
    env, gamma = Corridor(), 0.97
    q = q_net(env.n)
    target = copy.deepcopy(q).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=2e-3)
    memory = deque(maxlen=4000)
    s, updates, returns, ret, ep = env.reset(), 0, [], 0.0, 0
    for t in range(3600):
        eps = max(0.05, 1.0 - t / 2000)
        a = random.randrange(2) if random.random() < eps else int(q(s).argmax())
        s2, r, done, cut = env.step(a)
        memory.append((s, a, r, s2, float(done)))
        ret += r
        s = s2
        if done or cut:
            returns.append(ret)
            ret, s = 0.0, env.reset()
        if t >= 400 and t % 8 == 0:
            bs, ba, br, bn, bd = zip(*random.sample(memory, 64))
            bs, bn = torch.stack(bs), torch.stack(bn)
            ba, br, bd = torch.tensor(ba), torch.tensor(br), torch.tensor(bd)
            with torch.no_grad():
                goal = br + gamma * (1 - bd) * target(bn).max(1).values
            loss = F.smooth_l1_loss(q(bs).gather(1, ba[:, None])[:, 0], goal)
            opt.zero_grad()
            loss.backward()
            opt.step()
            updates += 1
            if updates % 25 == 0:
                target.load_state_dict(q.state_dict())
            if updates % 50 == 0:
                tail = returns[-10:]
                print(f"update {updates} td {loss.item():.5f} return {sum(tail) / max(1, len(tail)):.3f}")
    print(f"FINAL first returns {sum(returns[:10]) / 10:.3f} last {sum(returns[-20:]) / 20:.3f}")
    print("greedy", [int(q(e).argmax()) for e in torch.eye(env.n)])


main()
