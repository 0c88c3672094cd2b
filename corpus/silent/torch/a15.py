import math
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(15)
SYMBOLS, LENGTH, DIM = 4, 32, 64


def poll(n):
    """Votes for SYMBOLS candidates; the answer is the candidate with the most votes (ties: the first)."""
    lean = torch.distributions.Dirichlet(torch.full((SYMBOLS,), 2.0)).sample((n,))
    votes = torch.multinomial(lean, LENGTH, replacement=True)
    counts = F.one_hot(votes, SYMBOLS).sum(1)
    return votes, counts.argmax(1)


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.dh = heads, dim // heads
        self.wq, self.wk = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.wv, self.wo = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def split(self, t):
        return t.view(t.size(0), -1, self.h, self.dh).transpose(1, 2)

    def forward(self, q, mem):
        q, k, v = self.split(self.wq(q)), self.split(self.wk(mem)), self.split(self.wv(mem))
        scores = q @ k.transpose(-2, -1) * math.sqrt(self.dh)
        att = scores.softmax(dim=-1)
        y = (att @ v).transpose(1, 2).reshape(q.size(0), -1, self.h * self.dh)
        return self.wo(y)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.sym = nn.Embedding(SYMBOLS, DIM)
        self.pos = nn.Embedding(LENGTH, DIM)
        self.query = nn.Parameter(torch.randn(1, 1, DIM))
        self.att = nn.ModuleList([CrossAttention(DIM, 2) for _ in range(2)])
        self.ln = nn.ModuleList([nn.LayerNorm(DIM) for _ in range(3)])
        self.cls = nn.Linear(DIM, SYMBOLS)

    def forward(self, votes):
        mem = self.sym(votes) + self.pos(torch.arange(LENGTH))
        x = self.query.expand(len(votes), -1, -1)
        for ln, att in zip(self.ln, self.att):
            x = x + att(ln(x), mem)
        return self.cls(self.ln[2](x)).squeeze(1)


net = Reader()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
for step in range(200):
    votes, winner = poll(96)
    logits = net(votes)
    loss = F.cross_entropy(logits, winner)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == 199:
        print(f"{step:4d} loss {loss.item():.4f} acc {(logits.argmax(1) == winner).float().mean().item():.3f}")
