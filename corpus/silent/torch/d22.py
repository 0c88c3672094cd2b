import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


@dataclass
class Settings:
    lr: float = 3e-3
    warmup: int = 100
    epochs: int = 12
    batch: int = 64
    label_smoothing: float = 0.05


class ConvModule(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.total = s.epochs * (1400 // s.batch)
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(128, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=self.s.label_smoothing)

    def rate(self, t):
        if t < self.s.warmup:
            return (t + 1) / self.s.warmup
        return 0.5 * (1 + math.cos(math.pi * (t - self.s.warmup) / (self.total - self.s.warmup)))

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=self.s.lr, weight_decay=0.01)
        return opt, torch.optim.lr_scheduler.LambdaLR(opt, self.rate)


class Loop:
    def __init__(self, module):
        self.module = module

    def optimize(self, batch):
        opt, sched = self.module.configure_optimizers()
        opt.zero_grad()
        loss = self.module.training_step(batch)
        loss.backward()
        opt.step()
        sched.step()
        return loss.item()

    def fit(self, x, y):
        bs = self.module.s.batch
        for epoch in range(self.module.s.epochs):
            perm = torch.randperm(len(x))
            losses = [self.optimize((x[i], y[i])) for i in perm.split(bs) if len(i) == bs]
            print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")
        return losses[-1]


def main():
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    module = ConvModule(Settings())
    last = Loop(module).fit(x[:1400], y[:1400])
    with torch.no_grad():
        acc = (module(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"FINAL loss {last:.4f} acc {acc:.3f}")


if __name__ == "__main__":
    main()
