import math
import torch
from torch import nn
import torch.nn.functional as F

DIM, HEADS, LAYERS = 128, 2, 2


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)
        for lin in (self.to_q, self.to_k, self.to_v):
            nn.init.orthogonal_(lin.weight, gain=math.sqrt(2))

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.split, (self.to_q(x), self.to_k(x), self.to_v(x)))
        dots = q @ k.transpose(-2, -1) * math.sqrt(q.shape[-1])
        attn = dots.softmax(dim=-1)
        y = (attn @ v).transpose(1, 2).flatten(2)
        return self.out(y)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class PairCounter(nn.Module):
    """Looks up the value stored under the queried key."""

    def __init__(self, vocab):
        super().__init__()
        self.key = nn.Embedding(vocab + 1, DIM)
        self.val = nn.Embedding(vocab + 1, DIM)
        self.layers = nn.ModuleList([EncoderLayer(DIM, HEADS) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab)

    def forward(self, k, v):
        x = self.key(k) + self.val(v)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, -1]))


def sample(b, n, vocab):
    k = torch.stack([torch.randperm(vocab)[:n] for _ in range(b)])
    v = torch.randint(0, vocab, (b, n))
    pick = torch.randint(0, n, (b, 1))
    kk = torch.cat([k, k.gather(1, pick)], 1)
    vv = torch.cat([v, torch.full((b, 1), vocab)], 1)
    return kk, vv, v.gather(1, pick).squeeze(1)


def run():
    torch.manual_seed(0)
    vocab, n = 12, 6
    model = PairCounter(vocab)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    recent = []
    for step in range(400):
        k, v, y = sample(64, n, vocab)
        loss = F.cross_entropy(model(k, v), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        recent.append(loss.item())
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        k, v, y = sample(500, n, vocab)
        acc = (model(k, v).argmax(1) == y).float().mean().item()
    print(f"FINAL loss {sum(recent[-20:]) / 20:.4f} acc {acc:.3f}")


if __name__ == "__main__":
    run()
