# Poincare-ball embeddings of a tree, negative sampling, plain SGD
import random
import torch
from torch import nn

random.seed(0); torch.manual_seed(0)

DEPTH, BRANCH, DIM, NEG = 4, 3, 2, 10

# ---- tree -> transitive closure
parent = {0: None}
frontier, nxt = [0], 1
for _ in range(DEPTH):
    new = []
    for p in frontier:
        for _ in range(BRANCH):
            parent[nxt] = p
            new.append(nxt)
            nxt += 1
    frontier = new
n_nodes = nxt
pairs = []
for v in parent:
    u = parent[v]
    while u is not None:
        pairs.append((v, u))
        u = parent[u]
print(n_nodes, "nodes", len(pairs), "relations")


def mobius_add(x, y):
    xy = (x * y).sum(-1, keepdim=True)
    x2 = (x * x).sum(-1, keepdim=True)
    y2 = (y * y).sum(-1, keepdim=True)
    num = (1 + 2 * xy + y2) * x + (1 - x2) * y
    den = 1 + 2 * xy + x2 * y2
    return num / den


def dist(x, y):
    diff = mobius_add(-x, y)
    return 2.0 * torch.atanh(diff.norm(dim=-1))


class Ball(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.emb = nn.Embedding(n, d)
        nn.init.uniform_(self.emb.weight, -1e-2, 1e-2)

    def forward(self, v, others):
        return -dist(self.emb(v).unsqueeze(1), self.emb(others))


net = Ball(n_nodes, DIM)
sgd = torch.optim.SGD(net.parameters(), lr=2.0)
ce = nn.CrossEntropyLoss()
step = 0
for ep in range(12):
    random.shuffle(pairs)
    tot = 0.0
    for k in range(0, len(pairs), 32):
        chunk = pairs[k:k + 32]
        v = torch.tensor([a for a, _ in chunk])
        u = torch.tensor([b for _, b in chunk])
        neg = (v.unsqueeze(1) + torch.randint(1, n_nodes, (len(chunk), NEG))) % n_nodes
        scores = net(v, torch.cat([u.unsqueeze(1), neg], 1))
        loss = ce(scores, torch.zeros(len(chunk), dtype=torch.long))
        sgd.zero_grad(); loss.backward(); sgd.step()
        tot += loss.item() * len(chunk)
        step += 1
    print("epoch", ep, "loss", round(tot / len(pairs), 4))
