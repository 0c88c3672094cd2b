"""Adapt a small pre-trained transformer to a new labelling with low-rank updates."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
VOCAB, LEN, D = 16, 12, 32


class LowRank(nn.Module):
    def __init__(self, base, rank=4, alpha=16.0):
        super().__init__()
        self.base = base
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.down.t() @ self.up.t())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.fc1, self.fc2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, D // 4).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, D)
        x = x + self.proj(a)
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Parameter(0.1 * torch.randn(LEN, D))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, 2)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(x.mean(1))


def fit(model, rule, steps, lr, tag):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr)
    for s in range(steps):
        ids = torch.randint(0, VOCAB, (64, LEN))
        loss = F.cross_entropy(model(ids), rule(ids))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if s % 25 == 0 or s == steps - 1:
            print(f"{tag} {s:3d} loss {loss.item():.4f}")
    ids = torch.randint(0, VOCAB, (1000, LEN))
    with torch.no_grad():
        print(tag, "accuracy", (model(ids).argmax(1) == rule(ids)).float().mean().item())


many_low = lambda ids: ((ids < 8).sum(1) >= 7).long()
many_even = lambda ids: ((ids % 2 == 0).sum(1) >= 7).long()

model = Tagger()
fit(model, many_low, 120, 3e-3, "pretrain")
for p in model.parameters():
    p.requires_grad_(False)
for blk in model.blocks:
    for name in ("qkv", "proj", "fc1", "fc2"):
        setattr(blk, name, LowRank(getattr(blk, name)))
fit(model, many_even, 150, 5e-3, "adapt")
