# A GAN that learns a ring of eight gaussians
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


def ring(n):
    a = torch.randint(0, 8, (n,)) * (2 * math.pi / 8)
    return torch.stack([a.cos(), a.sin()], 1) * 2.0 + 0.15 * torch.randn(n, 2)


G = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
D = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
d_opt = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))


def d_step(n):
    real, fake = ring(n), G(torch.randn(n, 8)).detach()
    loss = F.softplus(-D(real)).mean() + F.softplus(D(fake)).mean()
    d_opt.zero_grad()
    loss.backward()
    d_opt.step()
    return loss.item()


def g_step(n):
    loss = F.softplus(-D(G(torch.randn(n, 8)))).mean()
    g_opt.zero_grad()
    loss.backward()
    g_opt.step()
    return loss.item()


@torch.no_grad()
def energy_distance(n=512):
    a, b = ring(n), G(torch.randn(n, 8))
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


print("start energy distance %.4f" % energy_distance())
for it in range(300):
    ld = d_step(256)
    lg = g_step(256)
    if it % 30 == 29:
        print(f"{it + 1:4d} d {ld:.4f} g {lg:.4f} energy distance {energy_distance():.4f}")
