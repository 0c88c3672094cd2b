"""WGAN-GP on a ring of Gaussians."""
import math

import torch
from torch import autograd, nn, optim

torch.manual_seed(2)
LAMBDA, N_CRITIC, BATCH, Z = 10.0, 3, 64, 4


def real_batch(n):
    k = torch.randint(0, 8, (n,)).float()
    ang = 2 * math.pi * k / 8
    return torch.stack([ang.cos(), ang.sin()], 1) * 2 + 0.05 * torch.randn(n, 2)


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(Z, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class Critic(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.f1 = nn.Linear(2, width)
        self.f2 = nn.Linear(width, width)
        self.f3 = nn.Linear(width, 1)
        for m in (self.f1, self.f2, self.f3):
            nn.init.kaiming_normal_(m.weight)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        x = torch.relu(self.f1(x))
        x = torch.relu(self.f2(x))
        return self.f3(x)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1)
    mix = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mix)
    grads = autograd.grad(score, mix, grad_outputs=torch.ones_like(score),
                          create_graph=True, retain_graph=True)[0]
    grads = grads.view(grads.size(0), -1)
    slopes = torch.sqrt(torch.sum(grads ** 2, dim=1))
    return ((slopes - 1) ** 2).mean()


G, D = Generator(), Critic()
g_opt = optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.9))
d_opt = optim.Adam(D.parameters(), lr=1e-3, betas=(0.5, 0.9))

for it in range(200):
    for _ in range(N_CRITIC):
        real = real_batch(BATCH)
        with torch.no_grad():
            fake = G(torch.randn(BATCH, Z))
        wdist = D(real).mean() - D(fake).mean()
        gp = gradient_penalty(D, real, fake)
        d_loss = -wdist + LAMBDA * gp
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()
    g_loss = -D(G(torch.randn(BATCH, Z))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
    if it % 20 == 0:
        print(f"{it:4d}  W {wdist.item():.4f}  gp {gp.item():.4f}  G {g_loss.item():.4f}")
