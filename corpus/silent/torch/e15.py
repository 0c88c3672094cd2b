import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, z=8, h=64):
        super().__init__()
        self.z = z
        self.net = nn.Sequential(nn.Linear(z, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(),
                                 nn.Linear(h, 2))

    def forward(self, z):
        return self.net(z)

    @torch.no_grad()
    def sample(self, n):
        return self(torch.randn(n, self.z))


class Critic(nn.Module):
    def __init__(self, h=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, h), nn.LeakyReLU(0.2), nn.Linear(h, h),
                                 nn.LeakyReLU(0.2), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def real_batch(n, modes=6):
    k = torch.randint(0, modes, (n,)).float()
    ang = 2 * math.pi * k / modes
    return 1.5 * torch.stack([ang.cos(), ang.sin()], 1) + 0.1 * torch.randn(n, 2)


class GanTrainer:
    def __init__(self, lr=1e-3):
        self.G, self.D = Generator(), Critic()
        self.g_opt = torch.optim.Adam(self.G.parameters(), lr=lr, betas=(0.5, 0.99))
        self.d_opt = torch.optim.Adam(self.D.parameters(), lr=lr, betas=(0.5, 0.99))

    def critic_step(self, real):
        fake = self.G.sample(len(real))
        loss = F.softplus(-self.D(real)).mean() + F.softplus(self.D(fake)).mean()
        self.d_opt.zero_grad()
        loss.backward()
        self.d_opt.step()
        return loss.item()

    def generator_step(self, n):
        fake = self.G.sample(n)
        loss = F.softplus(-self.D(fake)).mean()
        self.g_opt.zero_grad()
        loss.backward()
        self.g_opt.step()
        return loss.item()

    def report(self, step, d, g):
        fake = self.G.sample(2000)
        radius = fake.norm(dim=1)
        print(f"step {step:3d} d {d:.3f} g {g:.3f} radius {radius.mean().item():.3f} "
              f"spread {fake.std(0).mean().item():.3f}")

    def fit(self, steps=400, batch=128):
        for step in range(steps):
            d = self.critic_step(real_batch(batch))
            g = self.generator_step(batch)
            if step % 50 == 0 or step == steps - 1:
                self.report(step, d, g)


if __name__ == "__main__":
    torch.manual_seed(0)
    GanTrainer().fit()
