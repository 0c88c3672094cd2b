import io
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Stage:
    name: str
    steps: int
    lr: float
    period: float
    reduction: str
    batch: int = 64


PRETRAIN = Stage("pretrain", steps=120, lr=2e-3, period=24.0, reduction="sum")
ADAPT = Stage("adapt", steps=220, lr=2e-3, period=15.0, reduction="mean")


class TemporalNet(nn.Module):
    def __init__(self, ch=24, horizon=16):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(1 if i == 0 else ch, ch, 3, dilation=2 ** i, padding=2 ** i)
            for i in range(4))
        self.out = nn.Linear(ch, horizon)

    def forward(self, x):
        h = x.unsqueeze(1)
        for i, c in enumerate(self.convs):
            y = F.relu(c(h))
            h = y if i == 0 else h + y
        return self.out(h[:, :, -1])


def series(n, period, gen, length=48, horizon=16):
    t = torch.arange(length + horizon).float()
    phase = torch.rand(n, 1, generator=gen) * 6.283
    amp = 0.5 + torch.rand(n, 1, generator=gen)
    s = amp * torch.sin(6.283 * t / period + phase)
    s = s + 0.5 * amp * torch.sign(torch.sin(6.283 * t / (0.37 * period) + phase))
    s = s + 0.05 * torch.randn(s.shape, generator=gen)
    return s[:, :length], s[:, length:]


def save(model, opt):
    buf = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, buf)
    buf.seek(0)
    return buf


def train(stage, checkpoint=None, seed=0):
    gen = torch.Generator().manual_seed(seed)
    model = TemporalNet()
    opt = torch.optim.Adam(model.parameters(), lr=stage.lr)
    if checkpoint is not None:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
    for step in range(stage.steps):
        x, y = series(stage.batch, stage.period, gen)
        pred = model(x)
        loss = F.mse_loss(pred, y, reduction=stage.reduction)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 40 == 0 or step == stage.steps - 1:
            err = (pred.detach() - y).pow(2).mean().item()
            print(f"[{stage.name}] step {step:3d} loss {loss.item():.4f} per-point {err:.4f}")
    return save(model, opt)


def main():
    torch.manual_seed(0)
    ckpt = train(PRETRAIN, seed=1)
    train(ADAPT, checkpoint=ckpt, seed=2)


if __name__ == "__main__":
    main()
