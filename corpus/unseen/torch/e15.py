"""Self-play on 4x4 three-in-a-row: tree-search targets, masked policy/value net.
Unvisited moves have score inf (so each is tried once), illegal moves have -inf."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE, WIN, SIMS = 4, 3, 40
rng = np.random.default_rng(8)
torch.manual_seed(8)


def lines():
    out = []
    for r in range(SIZE):
        for c in range(SIZE):
            for dr, dc in ((0, 1), (1, 0), (1, 1), (1, -1)):
                cells = [(r + k * dr, c + k * dc) for k in range(WIN)]
                if all(0 <= a < SIZE and 0 <= b < SIZE for a, b in cells):
                    out.append([a * SIZE + b for a, b in cells])
    return np.array(out)


LINES = lines()


def winner(board):
    s = board[LINES].sum(1)
    return 1 if (s == WIN).any() else -1 if (s == -WIN).any() else 0


def playout(board, player):
    board = board.copy()
    while True:
        w, free = winner(board), np.flatnonzero(board == 0)
        if w or len(free) == 0:
            return w
        board[rng.choice(free)] = player
        player = -player


def ucb_search(board, player, c=0.6):
    legal = board == 0
    visits, value = np.zeros(SIZE * SIZE), np.zeros(SIZE * SIZE)
    for sim in range(SIMS):
        with np.errstate(divide="ignore", invalid="ignore"):
            score = value / visits + c * np.sqrt(math.log(sim + 1) / visits)
        score[visits == 0], score[~legal] = np.inf, -np.inf
        a = rng.choice(np.flatnonzero(score == score.max()))
        nxt = board.copy()
        nxt[a] = player
        visits[a] += 1
        value[a] += player * playout(nxt, -player)
    return visits / visits.sum()


class PolicyValue(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2 * SIZE * SIZE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.pi, self.v = nn.Linear(width, SIZE * SIZE), nn.Linear(width, 1)

    def forward(self, x):
        h = self.trunk(x)
        legal = (x.view(-1, 2, SIZE * SIZE).sum(1) == 0)
        logits = self.pi(h).masked_fill(~legal, -torch.inf)
        return F.log_softmax(logits, dim=-1), torch.tanh(self.v(h)).squeeze(-1), legal


def encode(board, player):
    return torch.tensor(np.concatenate([board == player, board == -player]), dtype=torch.float32)


def self_play():
    board, player, hist = np.zeros(SIZE * SIZE, int), 1, []
    while winner(board) == 0 and (board == 0).any():
        pi = ucb_search(board, player)
        hist.append((encode(board, player), pi, player))
        board[rng.choice(SIZE * SIZE, p=pi)] = player
        player = -player
    w = winner(board)
    return [(x, torch.tensor(pi, dtype=torch.float32), float(w * p)) for x, pi, p in hist], w


def versus_random(games=60):
    """score of the greedy policy, moving first"""
    total = 0
    for _ in range(games):
        board, player = np.zeros(SIZE * SIZE, int), 1
        while winner(board) == 0 and (board == 0).any():
            with torch.no_grad():
                logp = net(encode(board, player)[None])[0][0]
            board[logp.argmax().item() if player == 1 else rng.choice(np.flatnonzero(board == 0))] = player
            player = -player
        total += winner(board)
    return total / games


net = PolicyValue()
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
memory, results, best = [], [], -math.inf
print("greedy vs random, untrained:", round(versus_random(), 2))
for rnd in range(10):
    games = [self_play() for _ in range(3)]
    results += [w for _, w in games]
    memory += [m for g, _ in games for m in g]
    for _ in range(20):
        x, pi, z = zip(*[memory[i] for i in rng.integers(len(memory), size=64)])
        x, pi, z = torch.stack(x), torch.stack(pi), torch.tensor(z)
        logp, v, legal = net(x)
        ce = -(pi * logp.masked_fill(~legal, 0.0)).sum(1).mean()
        kl_target = torch.special.entr(pi).sum(1).mean()
        loss = ce + F.mse_loss(v, z)
        opt.zero_grad(); loss.backward(); opt.step()
    best = max(best, -loss.item())
    print(f"round {rnd} loss {loss.item():.4f} policy gap {(ce - kl_target).item():.4f} best {best:.4f} "
          f"games {results[-3:]} most negative logp {logp.min().item()}")
print("greedy vs random, trained:", round(versus_random(), 2))
