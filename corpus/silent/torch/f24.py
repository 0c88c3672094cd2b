from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Settings:
    channels: int = 24
    levels: int = 4
    window: int = 48
    ahead: int = 8
    lr: float = 1e-3
    betas: tuple = (0.9, 0.99)
    decay: float = 0.1
    batch: int = 64
    steps: int = 350


class CausalConv(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(cin, cout, 3, dilation=dilation)

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class TCN(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.inp = nn.Conv1d(1, s.channels, 1)
        self.convs = nn.ModuleList(CausalConv(s.channels, s.channels, 2 ** i) for i in range(s.levels))
        self.out = nn.Linear(s.channels, 1)

    def forward(self, x):
        h = self.inp(x[:, None])
        for conv in self.convs:
            h = h + F.gelu(conv(h))
        return self.out(h[:, :, -1]).squeeze(-1)


def make_series(n=4000, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(n).float()
    phase = torch.cumsum(0.05 + 0.02 * torch.sin(t / 60), 0)
    s = torch.sin(phase * 4) + 0.6 * torch.sin(phase * 9 + 1) + 0.05 * torch.randn(n, generator=g)
    return (s - s.mean()) / s.std()


def get_batch(series, lo, hi, s):
    at = torch.randint(lo, hi - s.window - s.ahead, (s.batch,))
    x = torch.stack([series[a: a + s.window] for a in at])
    return x, series[at + s.window + s.ahead - 1]


def main():
    torch.manual_seed(0)
    s = Settings()
    series = make_series()
    net = TCN(s)
    opt = torch.optim.AdamW(net.parameters(), s.lr, s.betas, s.decay)
    for step in range(s.steps):
        x, y = get_batch(series, 0, 3200, s)
        loss = F.huber_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 35 == 0:
            print(f"{step:4d} huber {loss.item():.5f}")
    with torch.no_grad():
        errs = [F.mse_loss(net(x), y).item() for x, y in (get_batch(series, 3200, 4000, s) for _ in range(10))]
    print(f"validation mse {sum(errs) / len(errs):.5f}")


if __name__ == "__main__":
    main()
