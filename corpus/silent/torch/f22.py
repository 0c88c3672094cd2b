import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.d_head = dim // heads
        self.scale = self.d_head ** 0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.d_head).permute(2, 0, 3, 1, 4)
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.softmax(dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))


class Counter(nn.Module):
    """Predicts, at every position, how often that token occurs in the sequence."""

    def __init__(self, vocab, length, dim=64, heads=2, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(0.02 * torch.randn(length, dim))
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 8)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(n, vocab, length):
    ids = torch.randint(0, vocab, (n, length))
    counts = (ids[:, :, None] == ids[:, None, :]).sum(-1)
    return ids, (counts - 1).clamp(max=7)


def main():
    torch.manual_seed(0)
    vocab, length, steps = 8, 20, 300
    model = Counter(vocab, length)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, total_iters=30)
    for step in range(steps):
        ids, target = batch(64, vocab, length)
        logits = model(ids)
        loss = F.cross_entropy(logits.reshape(-1, 8), target.reshape(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 30 == 0:
            acc = (logits.argmax(-1) == target).float().mean().item()
            print(f"step {step:3d} loss {loss.item():.4f} acc {acc:.3f}")
    with torch.no_grad():
        ids, target = batch(500, vocab, length)
        print(f"final acc {(model(ids).argmax(-1) == target).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
