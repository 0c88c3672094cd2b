import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def real_batch(n):
    k = torch.randint(0, 4, (n,)).float()
    ang = 2 * math.pi * k / 4
    return torch.stack([ang.cos(), ang.sin()], 1) * 2 + 0.2 * torch.randn(n, 2)


def mlp(i, o, h=96):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


def distance_to_modes(x):
    ang = 2 * math.pi * torch.arange(4) / 4
    modes = torch.stack([ang.cos(), ang.sin()], 1) * 2
    d, which = torch.cdist(x, modes).min(1)
    return d.mean().item(), which[d < 0.4].unique().numel()


def train(steps=400, n=256, z_dim=2):
    torch.manual_seed(1)
    gen, disc = mlp(z_dim, 2), mlp(2, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.0, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), lr=4e-3, betas=(0.0, 0.9))
    print("start: distance %.3f, modes %d" % distance_to_modes(gen(torch.randn(1000, z_dim)).detach()))
    for step in range(steps):
        for _ in range(2):
            real = real_batch(n).requires_grad_(True)
            fake = gen(torch.randn(n, z_dim)).detach()
            score = disc(real)
            slope = torch.autograd.grad(score.sum(), real, create_graph=True)[0]
            loss_d = F.softplus(-score).mean() + F.softplus(disc(fake)).mean()
            penalty = 0.1 * slope.pow(2).sum(1).mean()
            opt_d.zero_grad()
            (loss_d + penalty).backward()
            opt_d.step()
        fake = gen(torch.randn(n, z_dim))
        loss_g = F.softplus(-disc(fake)).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        if step % 40 == 0:
            print(f"{step:4d}  d {loss_d.item():.3f}  g {loss_g.item():.3f}")
    with torch.no_grad():
        out = gen(torch.randn(2000, z_dim))
    print("end: distance %.3f, modes %d" % distance_to_modes(out))


train()
