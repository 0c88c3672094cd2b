import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE = 5
GOAL = (4, 4)
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


class Grid:
    def reset(self):
        self.pos, self.t = (random.randrange(SIZE), random.randrange(SIZE)), 0
        if self.pos == GOAL:
            self.pos = (0, 0)
        return self.obs()

    def obs(self):
        v = torch.zeros(SIZE * SIZE)
        v[self.pos[0] * SIZE + self.pos[1]] = 1.0
        return v

    def step(self, a):
        r, c = self.pos
        dr, dc = MOVES[a]
        self.pos = (min(max(r + dr, 0), SIZE - 1), min(max(c + dc, 0), SIZE - 1))
        self.t += 1
        won = self.pos == GOAL
        return self.obs(), (1.0 if won else -0.02), won, won or self.t >= 30


def make_net():
    return nn.Sequential(nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, len(MOVES)))


def evaluate(net, episodes=25):
    env, total = Grid(), 0.0
    for _ in range(episodes):
        s, over = env.reset(), False
        while not over:
            with torch.no_grad():
                a = net(s).argmax().item()
            s, r, _, over = env.step(a)
            total += r
    return total / episodes


def main():
    random.seed(0)
    torch.manual_seed(0)
    online = make_net()
    target = copy.deepcopy(online).requires_grad_(False)
    opt = torch.optim.Adam(online.parameters(), lr=3e-3)
    memory, env, gamma = deque(maxlen=5000), Grid(), 0.95
    s, updates = env.reset(), 0
    print(f"return before training {evaluate(online):.3f}")
    for t in range(1600):
        eps = max(0.1, 1.0 - t / 1000)
        if random.random() < eps:
            a = random.randrange(len(MOVES))
        else:
            with torch.no_grad():
                a = online(s).argmax().item()
        s2, r, won, over = env.step(a)
        memory.append((s, a, r, s2, float(won)))
        s = env.reset() if over else s2
        if len(memory) >= 200 and t % 4 == 0:
            batch = random.sample(memory, 64)
            bs, ba, br, bs2, bd = zip(*batch)
            bs, bs2 = torch.stack(bs), torch.stack(bs2)
            ba, br, bd = torch.tensor(ba), torch.tensor(br), torch.tensor(bd)
            with torch.no_grad():
                goal = br + gamma * (1 - bd) * target(bs2).amax(1)
            q = online(bs).gather(1, ba[:, None]).squeeze(1)
            loss = F.smooth_l1_loss(q, goal)
            opt.zero_grad()
            loss.backward()
            opt.step()
            updates += 1
            if updates % 20 == 0:
                target.load_state_dict(online.state_dict())
            if updates % 50 == 0:
                print(f"update {updates:4d}  td loss {loss.item():.5f}  mean q {q.mean().item():.3f}")
    print(f"return after training {evaluate(online):.3f}")


if __name__ == "__main__":
    main()
