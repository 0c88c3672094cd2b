#!/usr/bin/env python
"""Tiny GPT on arithmetic-progression sequences; linear warm-up from zero, tight clipping, tied output layer."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, D))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, V, T, d=64, h=4, n=2):
        super().__init__()
        self.tok = nn.Embedding(V, d)
        self.pos = nn.Embedding(T, d)
        self.blocks = nn.Sequential(*[Block(d, h) for _ in range(n)])
        self.ln = nn.LayerNorm(d)
        self.lm = nn.Linear(d, V, bias=False)
        self.lm.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.05)
        nn.init.normal_(self.pos.weight, std=0.02)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        return self.lm(self.ln(self.blocks(h)))


def batch(n, V, T):
    start = torch.randint(0, V, (n, 1))
    stride = torch.randint(1, 4, (n, 1))
    s = (start + stride * torch.arange(T + 1)) % V
    return s[:, :-1], s[:, 1:]


def main(steps=220, V=17, T=12, lr=3e-3, warmup=40, clip=0.05):
    torch.manual_seed(13)
    net = GPT(V, T)
    opt = torch.optim.AdamW(net.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)

    def sched(s):
        if s < warmup:
            return s / warmup
        return 0.5 * (1 + math.cos(math.pi * (s - warmup) / (steps - warmup)))
    sch = torch.optim.lr_scheduler.LambdaLR(opt, sched)
    clipped = 0
    for s in range(steps):
        x, y = batch(48, V, T)
        loss = F.cross_entropy(net(x).reshape(-1, V), y.reshape(-1))
        opt.zero_grad()
        loss.backward()
        gn = nn.utils.clip_grad_norm_(net.parameters(), clip)
        clipped += int(gn > clip)
        opt.step()
        sch.step()
        if s % 20 == 0:
            print(f"{s:4d} lr {sch.get_last_lr()[0]:.5f} gnorm {gn:.3f} loss {loss.item():.4f}")
    with torch.no_grad():
        x, y = batch(400, V, T)
        acc = (net(x).argmax(-1) == y)[:, 1:].float().mean().item()
    print(f"clipped {clipped}/{steps}")
    print(f"final metric: loss {loss.item():.4f} acc {acc:.4f}")


main()
