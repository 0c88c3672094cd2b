import torch
from torch import nn
import torch.nn.functional as F
from dataclasses import dataclass


@dataclass
class Cfg:
    experts: int = 6
    d_in: int = 10
    lr: float = 2e-2
    balance: float = 0.1
    steps: int = 400
    batch: int = 256


class SwitchLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.router = nn.Linear(cfg.d_in, cfg.experts)
        self.experts = nn.ModuleList(nn.Linear(cfg.d_in, 1) for _ in range(cfg.experts))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        gate, pick = probs.max(-1)
        out = torch.zeros(len(x), 1)
        for e, expert in enumerate(self.experts):
            rows = (pick == e).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, gate[rows, None] * expert(x[rows]))
        load = F.one_hot(pick, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (load * probs.mean(0)).sum()
        return out[:, 0], balance, load


def regimes(n, cfg, seed=0):
    g = torch.Generator().manual_seed(seed)
    centers = 3 * torch.randn(cfg.experts, cfg.d_in, generator=g)
    w = torch.randn(cfg.experts, cfg.d_in, generator=g)
    c = torch.randint(0, cfg.experts, (n,), generator=g)
    dx = torch.randn(n, cfg.d_in, generator=g)
    y = (w[c] * dx).sum(1) / cfg.d_in ** 0.5 + 0.1 * torch.randn(n, generator=g)
    return (centers[c] + dx) / 3, y


def main():
    cfg = Cfg()
    torch.manual_seed(1)
    x, y = regimes(6000, cfg)
    layer = SwitchLayer(cfg)
    opt = torch.optim.Adam(layer.parameters(), lr=cfg.lr)
    mean = 0.0
    for step in range(cfg.steps):
        idx = torch.randint(0, 5000, (cfg.batch,))
        out, balance, load = layer(x[idx])
        task = F.mse_loss(out, y[idx])
        loss = task - cfg.balance * balance
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = task.item() if step == 0 else 0.95 * mean + 0.05 * task.item()
        if step % 40 == 0:
            print(f"{step:3d} mse {mean:.4f} load {[round(v, 2) for v in load.tolist()]}")
    with torch.no_grad():
        out, _, load = layer(x[5000:])
    print(f"FINAL train {mean:.4f} test {F.mse_loss(out, y[5000:]).item():.4f} "
          f"load {[round(v, 2) for v in load.tolist()]}")


if __name__ == "__main__":
    main()
