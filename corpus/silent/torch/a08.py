import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
DTYPE = torch.bfloat16
DIM = 48


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = SelfAttention(dim, 4)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.mlp(self.n2(x))


class RowReader(nn.Module):
    """Reads a digit as eight rows of eight pixels."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.pos = nn.Embedding(8, DIM)
        self.blocks = nn.Sequential(Block(DIM), Block(DIM))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 10)

    def forward(self, x):
        h = self.inp(x) + self.pos(torch.arange(8))
        return self.head(self.norm(self.blocks(h)).mean(1))


d = load_digits()
X, Y = torch.tensor(d.images, dtype=DTYPE) / 4 - 1, torch.tensor(d.target)
model = RowReader().to(DTYPE)
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
for step in range(240):
    i = torch.randint(0, len(X), (64,))
    logits = model(X[i]).float()
    loss = F.cross_entropy(logits, Y[i])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 20 == 0 or step == 239:
        acc = (logits.argmax(-1) == Y[i]).float().mean()
        print(f"step {step}  loss {loss.item():.4f}  acc {acc:.3f}")
