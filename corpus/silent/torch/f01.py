import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


@dataclass
class Config:
    dim: int = 48
    depth: int = 3
    heads: int = 4
    patch: int = 2
    batch: int = 64
    steps: int = 250
    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup: int = 30


class PatchEmbed(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.p = cfg.patch
        self.proj = nn.Linear(cfg.patch ** 2, cfg.dim)

    def forward(self, x):
        b = x.shape[0]
        x = x.unfold(1, self.p, self.p).unfold(2, self.p, self.p)
        return self.proj(x.reshape(b, -1, self.p ** 2))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.n1 = nn.LayerNorm(cfg.dim)
        self.attn = nn.MultiheadAttention(cfg.dim, cfg.heads, batch_first=True)
        self.n2 = nn.LayerNorm(cfg.dim)
        self.mlp = nn.Sequential(nn.Linear(cfg.dim, 2 * cfg.dim), nn.GELU(), nn.Linear(2 * cfg.dim, cfg.dim))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class TinyViT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = PatchEmbed(cfg)
        self.cls = nn.Parameter(torch.randn(1, 1, cfg.dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, (8 // cfg.patch) ** 2 + 1, cfg.dim) * 0.02)
        self.blocks = nn.ModuleList([Block(cfg) for _ in range(cfg.depth)])
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, 10)

    def forward(self, x):
        t = self.embed(x)
        t = torch.cat([self.cls.expand(len(t), -1, -1), t], 1) + self.pos
        for blk in self.blocks:
            t = blk(t)
        return self.head(self.norm(t[:, 0]))


def lr_at(step, cfg):
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    frac = (step - cfg.warmup) / (cfg.steps - cfg.warmup)
    return 0.5 * (1 + math.cos(math.pi * frac))


def main():
    torch.manual_seed(0)
    cfg = Config()
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32) / 8.0 - 1.0
    y = torch.tensor(d.target)
    xtr, xte, ytr, yte = train_test_split(x, y, test_size=0.25, random_state=0)
    model = TinyViT(cfg)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: lr_at(s, cfg))
    for step in range(cfg.steps):
        idx = torch.randint(0, len(xtr), (cfg.batch,))
        loss = F.cross_entropy(model(xtr[idx]), ytr[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 30 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}  lr {sched.get_last_lr()[0]:.2e}")
    model.eval()
    with torch.no_grad():
        acc = (model(xte).argmax(1) == yte).float().mean()
    print(f"test accuracy {acc.item():.3f}")


if __name__ == "__main__":
    main()
