import math
import random

import torch
from torch import nn

PAD, BOS, VOCAB = 0, 1, 20
random.seed(7)
torch.manual_seed(7)


def make_pad_mask(q_ids, k_ids):
    q_ok = (q_ids != PAD).unsqueeze(1).unsqueeze(3)
    k_ok = (k_ids != PAD).unsqueeze(1).unsqueeze(2)
    return q_ok & k_ok


def scaled_dot_product(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights @ v


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product(q, k, v, mask)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.att = Attention(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x, mask):
        x = x + self.att(self.n1(x), mask)
        return x + self.ff(self.n2(x))


class Tagger(nn.Module):
    def __init__(self, dim=32, heads=4, depth=2, max_len=32):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, 2)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        mask = make_pad_mask(ids, ids)
        for blk in self.blocks:
            x = blk(x, mask)
        return self.head(x)


def bucket_batches(n_batches, size):
    """Every bucket holds sentences of a similar length; the last ones are mixed."""
    for i in range(n_batches):
        base = 5 + i % 6
        lens = [base] * size if i < 6 else [random.randint(base, base + 3) for _ in range(size)]
        ids = torch.full((size, max(lens)), PAD)
        for row, n in enumerate(lens):
            ids[row, 0] = BOS
            ids[row, 1:n] = torch.randint(2, VOCAB, (n - 1,))
        tags = (ids % 2).masked_fill(ids == PAD, -100)
        yield ids, tags


model = Tagger()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
ce = nn.CrossEntropyLoss(ignore_index=-100)
for step, (ids, tags) in enumerate(bucket_batches(30, 16)):
    logits = model(ids)
    loss = ce(logits.reshape(-1, 2), tags.reshape(-1))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 3 == 0:
        keep = tags != -100
        acc = (logits.argmax(-1)[keep] == tags[keep]).float().mean()
        print(f"{step:3d} loss={loss.item():.4f} acc={acc.item():.3f}")
