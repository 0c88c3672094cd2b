import argparse
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab, ctx, dim=64, heads=4, layers=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(ctx, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, batch_first=True,
                                           norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight
        mask = torch.full((ctx, ctx), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, idx):
        h = self.tok(idx) + self.pos[: idx.shape[1]]
        h = self.body(h, mask=self.mask)
        return self.head(self.norm(h))


def make_stream(n, vocab, seed):
    """Second-order deterministic chain with a few random jumps."""
    g = torch.Generator().manual_seed(seed)
    jump = torch.rand(n, generator=g) < 0.05
    rnd = torch.randint(0, vocab, (n,), generator=g)
    s = [1, 2]
    for t in range(2, n):
        s.append(int(rnd[t]) if jump[t] else (s[-1] * 3 + s[-2] + 1) % vocab)
    return torch.tensor(s)


def batches(stream, ctx, bs):
    at = torch.randint(0, len(stream) - ctx - 1, (bs,))
    rows = torch.stack([stream[a:a + ctx + 1] for a in at])
    return rows[:, :-1], rows[:, 1:]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=200)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--micro", type=int, default=8)
    p.add_argument("--warmup", type=int, default=30)
    p.add_argument("--lr", type=float, default=4e-3)
    a = p.parse_args()
    torch.manual_seed(0)
    vocab, ctx = 11, 24
    stream = make_stream(6000, vocab, 1)
    model = TinyLM(vocab, ctx)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95), weight_decay=0.01)

    def factor(t):
        if t < a.warmup:
            return t / a.warmup
        done = (t - a.warmup) / (a.updates - a.warmup)
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    for u in range(a.updates):
        shown = 0.0
        for _ in range(a.accum):
            x, y = batches(stream, ctx, a.micro)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / a.accum
            loss.backward()
            shown += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sched.step()
        if u % 20 == 0 or u == a.updates - 1:
            print(f"update {u:3d} lr {sched.get_last_lr()[0]:.2e} loss {shown:.4f}")
    print(f"FINAL loss {shown:.4f} uniform {math.log(vocab):.4f}")


if __name__ == "__main__":
    main()
