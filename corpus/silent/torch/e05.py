import copy
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE = 5
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


class Grid:
    def reset(self):
        self.pos = [random.randrange(SIZE), random.randrange(SIZE)]
        self.t = 0
        return self.obs()

    def obs(self):
        v = torch.zeros(2 * SIZE)
        v[self.pos[0]] = 1.0
        v[SIZE + self.pos[1]] = 1.0
        return v

    def step(self, a):
        dx, dy = MOVES[a]
        self.pos[0] = min(max(self.pos[0] + dx, 0), SIZE - 1)
        self.pos[1] = min(max(self.pos[1] + dy, 0), SIZE - 1)
        self.t += 1
        goal = self.pos == [SIZE - 1, SIZE - 1]
        return self.obs(), (1.0 if goal else -0.05), goal, self.t >= 25


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * SIZE, 64), nn.ReLU(), nn.Linear(64, 64),
                                 nn.ReLU(), nn.Linear(64, len(MOVES)))

    def forward(self, s):
        return self.net(s)


def greedy_return(q, episodes=30):
    env, total = Grid(), 0.0
    for _ in range(episodes):
        s, end = env.reset(), False
        while not end:
            with torch.no_grad():
                s, r, goal, late = env.step(int(q(s).argmax()))
            total += r
            end = goal or late
    return total / episodes


random.seed(0)
torch.manual_seed(0)
q = QNet()
target = copy.deepcopy(q)
target.requires_grad_(False)
opt = torch.optim.Adam(q.parameters(), lr=2e-3)
memory = deque(maxlen=2000)
env = Grid()
s = env.reset()
updates = 0
for frame in range(1, 1401):
    eps = max(0.1, 1.0 - frame / 800)
    if random.random() < eps:
        a = random.randrange(len(MOVES))
    else:
        with torch.no_grad():
            a = int(q(s).argmax())
    s2, r, goal, late = env.step(a)
    memory.append((s, a, r, s2, float(goal)))
    s = env.reset() if goal or late else s2
    if frame < 200 or frame % 3:
        continue
    batch = random.sample(memory, 64)
    bs = torch.stack([b[0] for b in batch])
    ba = torch.tensor([b[1] for b in batch])
    br = torch.tensor([b[2] for b in batch])
    bn = torch.stack([b[3] for b in batch])
    bd = torch.tensor([b[4] for b in batch])
    with torch.no_grad():
        y = br + 0.95 * (1 - bd) * target(bn).max(1).values
    loss = F.smooth_l1_loss(q(bs).gather(1, ba[:, None]).squeeze(1), y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q.parameters(), 5.0)
    opt.step()
    updates += 1
    if updates % 40 == 0:
        target.load_state_dict(q.state_dict())
        print(f"frame {frame} updates {updates} loss {loss.item():.4f} return {greedy_return(q):.3f}")
