import math
import torch
import torch.nn as nn
import torch.nn.functional as F

N_TYPES, SEQ, DIM, HEADS = 6, 24, 64, 2


def make_batch(n, g):
    kinds = torch.randint(0, N_TYPES, (n, SEQ), generator=g)
    vals = torch.randn(n, SEQ, generator=g) + 0.0
    shift = torch.randn(n, N_TYPES, generator=g) * 1.0
    vals = vals + shift.gather(1, kinds)
    same = (kinds == kinds[:, :1]).float()
    target = (vals * same).sum(1) / same.sum(1)
    return kinds, vals, target


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h, self.dh = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, self.dh).permute(2, 0, 3, 1, 4)
        att = torch.softmax(q @ k.transpose(-2, -1) * math.sqrt(self.dh), dim=-1)
        return self.out((att @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.mlp(self.n2(x))


class SetModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = nn.Embedding(N_TYPES, DIM)
        self.value = nn.Linear(1, DIM)
        self.first = nn.Parameter(torch.randn(DIM))
        self.blocks = nn.Sequential(Block(DIM, HEADS), Block(DIM, HEADS))
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 1))

    def forward(self, kinds, vals):
        x = self.kind(kinds) + self.value(vals.unsqueeze(-1))
        x = torch.cat([x[:, :1] + self.first, x[:, 1:]], dim=1)
        return self.head(self.blocks(x)[:, 0]).squeeze(-1)


def run(steps=350):
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    model = SetModel()
    opt = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    val = make_batch(512, g)
    for step in range(steps):
        kinds, vals, target = make_batch(64, g)
        loss = F.mse_loss(model(kinds, vals), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 50 == 0 or step == steps - 1:
            with torch.no_grad():
                v = F.mse_loss(model(val[0], val[1]), val[2])
            print(f"{step:4d} train {loss.item():.4f} val {v.item():.4f} "
                  f"(variance {val[2].var().item():.3f})")


run()
