import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(2)
Z = 4


def real(n):
    t = torch.rand(n) * 3.1416
    pts = torch.stack([t.cos(), t.sin()], 1)
    flip = torch.rand(n) < 0.5
    pts[flip] = torch.stack([1 - t.cos(), 0.5 - t.sin()], 1)[flip]
    return pts - torch.tensor([0.5, 0.25]) + 0.03 * torch.randn(n, 2)


G = nn.Sequential(nn.Linear(Z, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2))
D = nn.Sequential(nn.Linear(2, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2),
                  nn.Linear(96, 1))
g_opt = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.5, 0.9))


def penalty(x):
    x = x.clone().requires_grad_(True)
    (grad,) = torch.autograd.grad(D(x).sum(), x, create_graph=True)
    return grad.pow(2).sum(1).mean()


def energy_distance(a, b):
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


holdout = real(800)
noise = torch.randn(800, Z)
for it in range(401):
    x = real(192)
    with torch.no_grad():
        fake = G(torch.randn(192, Z))
    d_loss = F.softplus(-D(x)).mean() + F.softplus(D(fake)).mean() + 0.05 * penalty(x)
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    D.requires_grad_(False)
    g_loss = F.softplus(-D(G(torch.randn(192, Z)))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    D.requires_grad_(True)

    if it % 50 == 0:
        with torch.no_grad():
            e = energy_distance(G(noise), holdout)
        print(f"it {it:3d} d_loss {d_loss.item():.3f} g_loss {g_loss.item():.3f} energy {e:.4f}")
