from dataclasses import dataclass
import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    dim: int = 16
    experts: int = 8
    steps: int = 400
    batch: int = 256
    lr: float = 5e-3
    balance: float = 0.2
    seed: int = 4


class MoE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.router = nn.Linear(cfg.dim, cfg.experts)
        self.weight = nn.Parameter(torch.randn(cfg.experts, cfg.dim, cfg.dim) / cfg.dim ** 0.5)
        self.bias = nn.Parameter(torch.zeros(cfg.experts, cfg.dim))

    def forward(self, x):
        probs = F.softmax(self.router(x), dim=-1)
        top, idx = probs.max(dim=-1)
        y = torch.einsum("bi,bij->bj", x, self.weight[idx]) + self.bias[idx]
        return y * top.unsqueeze(-1), probs, idx


def balance_term(probs):
    load = probs.mean(dim=0)
    return -(load * torch.log(load + 1e-9)).sum()


class Regions:
    def __init__(self, cfg):
        g = torch.Generator().manual_seed(cfg.seed)
        self.g = g
        self.centers = 3.0 * F.normalize(torch.randn(cfg.experts, cfg.dim, generator=g), dim=-1)
        self.maps = torch.randn(cfg.experts, cfg.dim, cfg.dim, generator=g) / cfg.dim ** 0.5

    def sample(self, n):
        z = torch.randint(0, len(self.centers), (n,), generator=self.g)
        noise = torch.randn(n, self.centers.shape[1], generator=self.g)
        x = self.centers[z] + 0.5 * noise
        return x, torch.einsum("bi,bij->bj", x, self.maps[z])


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    data = Regions(cfg)
    model = MoE(cfg)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        x, y = data.sample(cfg.batch)
        pred, probs, idx = model(x)
        mse = F.mse_loss(pred, y)
        loss = mse + cfg.balance * balance_term(probs)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0 or step == cfg.steps - 1:
            counts = torch.bincount(idx, minlength=cfg.experts).tolist()
            print(f"step {step:3d} mse {mse.item():.4f} target var {y.var().item():.3f} use {counts}")


if __name__ == "__main__":
    main()
