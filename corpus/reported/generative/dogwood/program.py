"""Conditional generator: photo features -> 1-D 'spectrogram' envelope, LSGAN + small L1 term."""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(21)
COND, LATENT, LEN = 4, 4, 32
LAMBDA_L1 = 0.5


def real_pairs(n, g):
    f = torch.rand(n, COND, generator=g)
    t = torch.linspace(0, 1, LEN)
    decay = 2.0 + 4.0 * f[:, :1]
    onset = torch.where(torch.rand(n, 1, generator=g) < 0.5, 0.15, 0.55) + 0.1 * f[:, 1:2]
    env = torch.exp(-decay * (t - onset).clamp(min=0)) * torch.sigmoid(60 * (t - onset))
    return f, 2 * env - 1 + 0.02 * torch.randn(n, LEN, generator=g)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(COND + LATENT, 128), nn.LeakyReLU(0.2),
            nn.Linear(128, 128), nn.LeakyReLU(0.2),
            nn.Linear(128, LEN), nn.Tanh(),
        )

    def forward(self, f):
        z = torch.randn(f.shape[0], LATENT)
        return self.net(torch.cat([f, z], dim=1))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(LEN + COND, 128), nn.LeakyReLU(0.2),
            nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1),
        )

    def forward(self, spec, f):
        return self.net(torch.cat([spec, f], dim=1))


class Trainer:
    def __init__(self):
        self.g, self.d = Generator(), Discriminator()
        self.opt_g = torch.optim.Adam(self.g.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.opt_d = torch.optim.Adam(self.d.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def training_step(self, batch, optimizer_idx):
        f, spec = batch
        fake_spec = self.g(f)
        if optimizer_idx == 0:
            d_fake2 = self.d(fake_spec.detach(), f)
            g_loss1 = F.mse_loss(d_fake2, torch.ones_like(d_fake2))
            g_loss2 = F.l1_loss(fake_spec, spec)
            self.log = {"G": g_loss1.item(), "L1": g_loss2.item()}
            return g_loss1 + LAMBDA_L1 * g_loss2
        d_fake = self.d(fake_spec.detach(), f)
        d_real = self.d(spec, f)
        self.log["D"] = (0.5 * (d_real - 1).pow(2).mean() + 0.5 * d_fake.pow(2).mean()).item()
        self.log["D_real"] = d_real.mean().item()
        return 0.5 * F.mse_loss(d_real, torch.ones_like(d_real)) + 0.5 * F.mse_loss(d_fake, torch.zeros_like(d_fake))


def sliced_distance(a, b, g):
    proj = torch.randn(a.shape[1], 200, generator=g)
    proj = proj / proj.norm(dim=0)
    return ((a @ proj).sort(dim=0).values - (b @ proj).sort(dim=0).values).abs().mean().item()


g = torch.Generator().manual_seed(1)
val = real_pairs(2000, g)
tr = Trainer()
for step in range(200):
    batch = real_pairs(256, g)
    loss_g = tr.training_step(batch, 0)
    tr.opt_g.zero_grad()
    loss_g.backward()
    tr.opt_g.step()
    loss_d = tr.training_step(batch, 1)
    tr.opt_d.zero_grad()
    loss_d.backward()
    tr.opt_d.step()
    if step % 25 == 0:
        print(step, "  ".join(f"{k} {v:.3f}" for k, v in tr.log.items()))

with torch.no_grad():
    fake = tr.g(val[0])
print("FINAL", sliced_distance(torch.cat([fake, val[0]], 1), torch.cat([val[1], val[0]], 1), g))
