"""DDPM on two moons, epsilon prediction with min-SNR loss weights."""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from sklearn.datasets import make_moons


@dataclass
class Config:
    T: int = 200
    snr_gamma: float = 5.0
    batch: int = 32
    lr: float = 2e-3
    steps: int = 150
    ema: float = 0.99
    seed: int = 0


def linear_alphas_bar(T):
    betas = torch.linspace(1e-4, 0.05, T)
    return torch.cumprod(1 - betas, dim=0)


def enforce_zero_terminal_snr(alphas_bar):
    s = alphas_bar.sqrt()
    first, last = s[0].clone(), s[-1].clone()
    s = (s - last) * first / (first - last)
    return s ** 2


class Denoiser(nn.Module):
    def __init__(self, T, width=64):
        super().__init__()
        self.T = T
        self.net = nn.Sequential(nn.Linear(2 + 8, width), nn.SiLU(), nn.Linear(width, width),
                                 nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        freq = 2.0 ** torch.arange(4)
        ang = (t.float() / self.T * math.pi).unsqueeze(1) * freq
        return self.net(torch.cat([x, ang.sin(), ang.cos()], dim=1))


class Diffusion:
    def __init__(self, cfg):
        self.cfg = cfg
        self.abar = enforce_zero_terminal_snr(linear_alphas_bar(cfg.T))
        self.snr = self.abar / (1 - self.abar)

    def q_sample(self, x0, t, eps):
        a = self.abar[t].unsqueeze(1)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps

    def loss(self, model, x0):
        t = torch.randint(0, self.cfg.T, (len(x0),))
        eps = torch.randn_like(x0)
        pred = model(self.q_sample(x0, t, eps), t)
        snr = self.snr[t]
        weight = snr.clamp(max=self.cfg.snr_gamma) / snr
        return (weight * (pred - eps).pow(2).mean(dim=1)).mean()


def main(cfg=Config()):
    torch.manual_seed(cfg.seed)
    data = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
    data = (data - data.mean(0)) / data.std(0)
    model, diff = Denoiser(cfg.T), Diffusion(cfg)
    shadow = {k: v.clone() for k, v in model.state_dict().items()}
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        x0 = data[torch.randint(0, len(data), (cfg.batch,))]
        loss = diff.loss(model, x0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        for k, v in model.state_dict().items():
            shadow[k].lerp_(v, 1 - cfg.ema)
        if step % 5 == 0:
            print(f"step {step:4d} loss {loss.item():.4f}")
    print("ema ok:", all(v.isfinite().all().item() for v in shadow.values()))


if __name__ == "__main__":
    main()
