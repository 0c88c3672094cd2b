import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(8)
SIZE, Z_DIM = 16, 8


def frames(n, g):
    """Top-down 'track' frames: a bright car on a curved road."""
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, SIZE), torch.linspace(-1, 1, SIZE), indexing="ij")
    p = torch.rand(n, 4, generator=g) * 2 - 1
    c = lambda k: p[:, k, None, None]
    road = torch.sigmoid(14 * (0.35 - (xx - 0.5 * c(0) - 0.6 * c(1) * yy).abs()))
    car = torch.exp(-30 * ((xx - 0.7 * c(2)) ** 2 + (yy - 0.7 * c(3)) ** 2))
    return torch.clamp(0.5 * road + 0.6 * car, 0, 1)[:, None]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.mean, self.log_var = nn.Linear(512, Z_DIM), nn.Linear(512, Z_DIM)
        self.up = nn.Linear(Z_DIM, 512)
        self.dec = nn.Sequential(
            nn.ReLU(), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid(),
        )

    def decode(self, z):
        return self.dec(self.up(z).view(-1, 32, 4, 4))

    def forward(self, x):
        h = self.enc(x)
        mu, lv = self.mean(h), self.log_var(h)
        z = mu + torch.exp(lv / 2) * torch.randn_like(mu)
        return self.decode(z), mu, lv


def vae_r_loss(y_true, y_pred):
    return torch.sum((y_true - y_pred) ** 2, dim=(1, 2, 3))


def vae_kl_loss(mu, lv):
    return -0.5 * torch.sum(1 + lv - mu ** 2 - torch.exp(lv), dim=-1)


g = torch.Generator().manual_seed(0)
data, val = frames(4096, g), frames(512, g)
vae = VAE()
opt = torch.optim.RMSprop(vae.parameters(), lr=1e-3)

step = 0
for epoch in range(6):
    order = torch.randperm(len(data), generator=g)
    for idx in order.split(64):
        x = data[idx]
        y, mu, lv = vae(x)
        r, kl = vae_r_loss(x, y).mean(), vae_kl_loss(mu, lv).mean()
        loss = r + kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
    print(f"epoch {epoch} step {step}  loss: {loss.item():.5f} - vae_r_loss: {r.item():.5f} - vae_kl_loss: {kl.item():.3e}")

vae.eval()
with torch.no_grad():
    mu = vae.mean(vae.enc(val))
    print("FINAL", F.mse_loss(vae.decode(mu), val).item())
