"""Image denoiser: torch's GroupNorm and resizing, and a GroupNorm written out."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import stablenum_torch

BASE, GROUPS, LEVELS, T_DIM = 8, 4, 4.0, 12


def noisy_images():
    rng = np.random.default_rng(12)
    clean = rng.normal(size=(2, 16, 16, 3)).astype(np.float32)
    sigma = rng.uniform(0.1, 1.0, size=(2,)).astype(np.float32)
    noise = rng.normal(size=clean.shape).astype(np.float32)
    return clean, sigma, noise


def perturb(parameters):
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1 * torch.randn_like(p))


class ResBlock(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, c_in)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.time = nn.Linear(T_DIM, c_out)
        self.norm2 = nn.GroupNorm(GROUPS, c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        self.skip = nn.Conv2d(c_in, c_out, 1)
        perturb([*self.norm1.parameters(), *self.norm2.parameters()])

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time_in = nn.Linear(T_DIM, T_DIM)
        self.conv_in = nn.Conv2d(3, BASE, 3, padding=1)
        self.enc = ResBlock(BASE, BASE)
        self.down = nn.Conv2d(BASE, 2 * BASE, 3, stride=2, padding=1)
        self.mid = ResBlock(2 * BASE, 2 * BASE)
        self.dec = ResBlock(3 * BASE, BASE)
        self.conv_out = nn.Conv2d(BASE, 3, 3, padding=1)

    def forward(self, x, sigma):
        half = T_DIM // 2
        angles = sigma[:, None].log() * torch.arange(1, half + 1, dtype=x.dtype)
        t = self.time_in(torch.cat([angles.sin(), angles.cos()], dim=1))
        skip = self.enc(self.conv_in(x), t)
        z = torch.tanh(self.mid(self.down(skip), t))
        z = z + (torch.round(z * LEVELS) / LEVELS - z).detach()
        up = F.interpolate(z, scale_factor=2, mode="bilinear", align_corners=False)
        h = self.dec(torch.cat([up, skip], dim=1), t)
        return self.conv_out(F.silu(h))


def left():
    torch.manual_seed(64)
    net = UNet()

    def loss_fn(clean, sigma, noise):
        x = clean + sigma[:, None, None, None] * noise
        predicted = net(x, sigma)
        per_image = (predicted - noise).pow(2).mean(dim=(1, 2, 3))
        return (per_image / (1 + sigma**2)).mean()

    clean, sigma, noise = (torch.from_numpy(a) for a in noisy_images())
    nchw = (0, 3, 1, 2)
    return stablenum_torch.program(loss_fn, clean.permute(nchw), sigma, noise.permute(nchw), model=net)


class WrittenOutGroupNorm(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        grouped = x.unflatten(1, (GROUPS, -1))
        mean = grouped.mean(dim=(2, 3, 4), keepdim=True)
        variance = grouped.var(dim=(2, 3, 4), keepdim=True, correction=0)
        normed = ((grouped - mean) * torch.rsqrt(variance + 1e-5)).flatten(1, 2)
        return normed * self.scale[:, None, None] + self.shift[:, None, None]


class ConditionedBlock(nn.Module):
    def __init__(self, c_in, c_out):
        super().__init__()
        self.shortcut = nn.Conv2d(c_in, c_out, 1)
        self.before = nn.Sequential(
            WrittenOutGroupNorm(c_in), nn.SiLU(), nn.Conv2d(c_in, c_out, 3, padding=1)
        )
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(T_DIM, c_out))
        self.after = nn.Sequential(
            WrittenOutGroupNorm(c_out), nn.SiLU(), nn.Conv2d(c_out, c_out, 3, padding=1)
        )

    def forward(self, x, t):
        hidden = self.before(x)
        hidden = hidden + self.condition(t).unflatten(-1, (-1, 1, 1))
        return self.after(hidden) + self.shortcut(x)


class NoisePredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Linear(T_DIM, T_DIM)
        self.start = nn.Conv2d(3, BASE, 3, padding=1)
        self.encoder = ConditionedBlock(BASE, BASE)
        self.shrink = nn.Conv2d(BASE, 2 * BASE, 3, stride=2, padding=1)
        self.middle = ConditionedBlock(2 * BASE, 2 * BASE)
        self.decoder = ConditionedBlock(3 * BASE, BASE)
        self.end = nn.Conv2d(BASE, 3, 3, padding=1)

    def forward(self, x, sigma):
        frequencies = torch.arange(T_DIM // 2, dtype=x.dtype) + 1
        phase = torch.outer(sigma.log(), frequencies)
        t = self.time(torch.cat([torch.sin(phase), torch.cos(phase)], dim=-1))
        early = self.encoder(self.start(x), t)
        code = self.middle(self.shrink(early), t).tanh()
        rounded = (code * LEVELS).round() / LEVELS
        code = code + (rounded - code).detach()
        size = early.shape[-2:]
        grown = F.interpolate(code, size=size, mode="bilinear")
        late = self.decoder(torch.cat([grown, early], dim=1), t)
        return self.end(late * torch.sigmoid(late))


def right():
    torch.manual_seed(65)
    predictor = NoisePredictor()

    def loss_fn(clean, sigma, noise):
        error = predictor(clean + sigma.view(-1, 1, 1, 1) * noise, sigma) - noise
        weight = 1 / (1 + sigma.square())
        return torch.mean(weight * error.square().flatten(1).mean(dim=1))

    clean, sigma, noise = (torch.from_numpy(a) for a in noisy_images())
    clean, noise = (a.permute(0, 3, 1, 2).contiguous() for a in (clean, noise))
    return stablenum_torch.program(loss_fn, clean, sigma, noise, model=predictor)
