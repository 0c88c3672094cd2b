"""A tiny GAN for points on a ring."""
import math
import torch
from torch import nn

torch.manual_seed(21)
NOISE = 2


def ring(n):
    phi = 2 * math.pi * torch.rand(n)
    r = 1.0 + 0.05 * torch.randn(n)
    return torch.stack([r * phi.cos(), r * phi.sin()], dim=1)


def mlp(sizes, act):
    mods = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        mods += [nn.Linear(a, b), act()]
    return nn.Sequential(*mods[:-1])


class RingGAN:
    def __init__(self):
        self.gen = mlp([NOISE, 96, 96, 2], nn.ReLU)
        self.disc = mlp([2, 96, 96, 1], lambda: nn.LeakyReLU(0.2))
        self.g_opt = torch.optim.Adam(self.gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
        self.d_opt = torch.optim.Adam(self.disc.parameters(), lr=5e-3, betas=(0.5, 0.99))
        self.bce = nn.BCEWithLogitsLoss()

    def disc_step(self, real):
        fake = self.gen(torch.randn(len(real), NOISE)).detach()
        loss = self.bce(self.disc(real), torch.full((len(real), 1), 0.9)) \
            + self.bce(self.disc(fake), torch.zeros(len(real), 1))
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def gen_step(self, n):
        loss = self.bce(self.disc(self.gen(torch.randn(n, NOISE))), torch.ones(n, 1))
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()

    @torch.no_grad()
    def quality(self):
        pts = self.gen(torch.randn(2000, NOISE))
        radius = pts.norm(dim=1)
        sector = ((torch.atan2(pts[:, 1], pts[:, 0]) + math.pi) / (2 * math.pi) * 12).long().clamp(0, 11)
        cover = (torch.bincount(sector, minlength=12) > 20).sum().item()
        return (radius - 1).abs().mean().item(), cover


gan = RingGAN()
for it in range(300):
    d = gan.disc_step(ring(128))
    g = gan.gen_step(128)
    if it % 50 == 0 or it == 299:
        off, cover = gan.quality()
        print(f"it {it:3d}  d_loss {d:.3f}  g_loss {g:.3f}  off-ring {off:.3f}  sectors {cover}/12")
