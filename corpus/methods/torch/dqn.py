"""DQN on a small grid: replay memory, and a target network that follows by Polyak averaging."""
import copy
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE, GOAL, PITS = 5, (4, 4), {(1, 3), (3, 1), (2, 2)}
MOVES = [(0, 1), (0, -1), (1, 0), (-1, 0)]


def step(pos, action):
    r, c = pos[0] + MOVES[action][0], pos[1] + MOVES[action][1]
    new = (min(max(r, 0), SIZE - 1), min(max(c, 0), SIZE - 1))
    if new == GOAL:
        return new, 1.0, True
    if new in PITS:
        return new, -1.0, True
    return new, -0.01, False


def encode(pos):
    x = torch.zeros(SIZE * SIZE)
    x[pos[0] * SIZE + pos[1]] = 1.0
    return x


def returns(net, starts):
    total = 0.0
    for pos in starts:
        for _ in range(30):
            with torch.no_grad():
                action = int(net(encode(pos)).argmax())
            pos, reward, done = step(pos, action)
            total += reward
            if done:
                break
    return total / len(starts)


def main(episodes=250, gamma=0.95, tau=0.02):
    random.seed(0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    target = copy.deepcopy(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    starts = [(r, c) for r in range(SIZE) for c in range(SIZE) if (r, c) != GOAL and (r, c) not in PITS]
    memory = []
    for episode in range(episodes):
        pos, explore = random.choice(starts), max(0.1, 1 - episode / 150)
        for _ in range(25):
            with torch.no_grad():
                action = random.randrange(4) if random.random() < explore else int(net(encode(pos)).argmax())
            new, reward, done = step(pos, action)
            memory.append((encode(pos), action, reward, encode(new), float(done)))
            pos = new
            if len(memory) >= 200:
                s, a, r, n, d = zip(*random.sample(memory[-5000:], 64))
                s, n, a = torch.stack(s), torch.stack(n), torch.tensor(a)
                with torch.no_grad():
                    best = net(n).argmax(1, keepdim=True)
                    goal = torch.tensor(r) + gamma * (1 - torch.tensor(d)) * target(n).gather(1, best)[:, 0]
                loss = F.smooth_l1_loss(net(s).gather(1, a[:, None])[:, 0], goal)
                opt.zero_grad()
                loss.backward()
                opt.step()
                with torch.no_grad():
                    for t, p in zip(target.parameters(), net.parameters()):
                        t.mul_(1 - tau).add_(tau * p)
            if done:
                break
        if episode % 50 == 49:
            print(f"{episode + 1:4d} loss {loss.item():.5f} mean return {returns(net, starts):.3f}")


if __name__ == "__main__":
    main()
