"""T5 style bucketed relative positions, tiny encoder: sort out whether a bracket string is balanced up to each point"""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
NUM_BUCKETS, MAX_DIST = 16, 40


def relative_bucket(rel):
    """causal version: rel = key - query; nearby positions get their own bucket, far ones share (log spaced)"""
    n = (-rel).clamp(min=0)
    exact = NUM_BUCKETS // 2
    scaled = torch.log(n.float() / exact) / math.log(MAX_DIST / exact) * (NUM_BUCKETS - exact)
    far = exact + scaled.clamp(min=-1e6).long()
    far = far.clamp(max=NUM_BUCKETS - 1)
    return torch.where(n < exact, n, far)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.o = nn.Linear(dim, dim)
        self.bias = nn.Embedding(NUM_BUCKETS, heads)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        pos = torch.arange(T)
        rel = pos[None, :] - pos[:, None]
        bias = self.bias(relative_bucket(rel)).permute(2, 0, 1)
        future = torch.full((T, T), float("-inf")).triu(1)
        att = (q @ k.transpose(-1, -2)) / math.sqrt(D // self.h) + bias + future
        y = att.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class Enc(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(2, dim)
        self.att = nn.ModuleList([Attention(dim, 4) for _ in range(depth)])
        self.ff = nn.ModuleList([nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(depth)])
        self.n = nn.ModuleList([nn.LayerNorm(dim) for _ in range(depth)])
        self.out = nn.Linear(dim, 3)

    def forward(self, ids):
        x = self.emb(ids)
        for n, a, f in zip(self.n, self.att, self.ff):
            x = x + a(n(x))
            x = x + f(x)
        return self.out(x)


def make(n, T=24):
    s = torch.randint(0, 2, (n, T))
    depth = (1 - 2 * s).cumsum(1)
    return s, 1 + depth.sign()          # more closed / even / more open


net = Enc()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
best_val = float("inf")
vx, vy = make(200)
for step in range(120):
    x, y = make(48)
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 14:
        with torch.no_grad():
            out = net(vx)
            v = F.cross_entropy(out.flatten(0, 1), vy.flatten()).item()
        mark = "*" if v < best_val else ""
        best_val = min(best_val, v)
        print(f"{step + 1:3d} train {loss.item():.4f} val {v:.4f} acc {(out.argmax(-1) == vy).float().mean().item():.3f} {mark}")
assert best_val < 0.35
