"""Key-value lookup: the query names a key, the net has to return that key's value."""
import math
import torch
from torch import nn
import torch.nn.functional as F

KEYS, VALUES, PAIRS, DIM = 32, 8, 12, 64


class Attention(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, self.hd).transpose(1, 2)

    def forward(self, query, memory):
        q, k, v = self.split(self.q(query)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = q @ k.transpose(-2, -1) * math.sqrt(self.hd)
        weights = scores.softmax(dim=-1)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        return self.o(mixed)


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.key_emb = nn.Embedding(KEYS, DIM)
        self.val_emb = nn.Embedding(VALUES, DIM)
        self.ask = nn.Embedding(KEYS, DIM)
        self.attn = Attention(DIM)
        self.out = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VALUES))

    def forward(self, keys, values, query):
        memory = self.key_emb(keys) + self.val_emb(values)
        return self.out(self.attn(self.ask(query).unsqueeze(1), memory).squeeze(1))


def episode(n):
    keys = torch.rand(n, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(0, VALUES, (n, PAIRS))
    pick = torch.randint(0, PAIRS, (n, 1))
    return keys, values, keys.gather(1, pick).squeeze(1), values.gather(1, pick).squeeze(1)


torch.manual_seed(17)
net = Lookup()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
for it in range(1, 151):
    keys, values, query, answer = episode(96)
    logits = net(keys, values, query)
    loss = F.cross_entropy(logits, answer)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 25 == 0:
        print(f"{it:4d} loss {loss:.4f} acc {(logits.argmax(-1) == answer).float().mean():.3f}")
