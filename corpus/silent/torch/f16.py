import torch
import torch.nn as nn
import torch.nn.functional as F


class MoonData:
    def __init__(self, noise=0.08):
        self.noise = noise

    def sample(self, n):
        t = torch.rand(n) * torch.pi
        up = torch.rand(n) < 0.5
        x = torch.where(up, t.cos(), 1 - t.cos())
        y = torch.where(up, t.sin(), 0.5 - t.sin())
        return torch.stack([x, y], 1) + self.noise * torch.randn(n, 2)


def build(d_in, d_out, width=64):
    return nn.Sequential(
        nn.Linear(d_in, width), nn.LeakyReLU(0.2),
        nn.Linear(width, width), nn.LeakyReLU(0.2),
        nn.Linear(width, d_out),
    )


class GANTrainer:
    def __init__(self, data, latent=4, lr=1e-3, seed=0):
        self.data, self.latent, self.seed = data, latent, seed
        self.reset()
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=lr, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.disc.parameters(), lr=lr, betas=(0.5, 0.9))

    def reset(self):
        torch.manual_seed(self.seed)
        self.gen = build(self.latent, 2)
        self.disc = build(2, 1)

    def step_d(self, n):
        fake = self.gen(torch.randn(n, self.latent)).detach()
        loss = F.softplus(-self.disc(self.data.sample(n))).mean() + F.softplus(self.disc(fake)).mean()
        self.opt_d.zero_grad()
        loss.backward()
        self.opt_d.step()
        return loss.item()

    def step_g(self, n):
        loss = F.softplus(-self.disc(self.gen(torch.randn(n, self.latent)))).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    @torch.no_grad()
    def mmd(self, n=1000):
        a, b = self.data.sample(n), self.gen(torch.randn(n, self.latent))
        k = lambda u, v: torch.exp(-torch.cdist(u, v).pow(2) / 0.2).mean()
        return (k(a, a) + k(b, b) - 2 * k(a, b)).item()

    def fit(self, steps=400, n=128):
        self.reset()
        for i in range(steps):
            d = self.step_d(n)
            g = self.step_g(n)
            if i % 50 == 0:
                print(f"{i:4d} d_loss {d:.3f} g_loss {g:.3f} mmd {self.mmd():.4f}")
        print(f"final mmd {self.mmd():.4f}")
        return self


if __name__ == "__main__":
    GANTrainer(MoonData()).fit()
