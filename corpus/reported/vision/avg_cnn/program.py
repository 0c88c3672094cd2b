import copy
import numpy as np
import torch
from torch import nn

torch.manual_seed(7)
rng = np.random.default_rng(7)


def make_images(n):
    """Ten-way texture problem, 3x16x16, pixel range 0..255 as loaded from disk."""
    y = rng.integers(0, 10, n)
    yy, xx = np.mgrid[0:16, 0:16]
    out = np.zeros((n, 3, 16, 16), np.float32)
    for i in range(n):
        f = 0.25 + 0.09 * y[i]
        ang = 0.6 * y[i] + 0.1 * rng.normal()
        ph = rng.uniform(0, 6.28)
        wave = np.sin(f * (np.cos(ang) * xx + np.sin(ang) * yy) * 2 + ph)
        out[i] = 120 + 40 * wave + 25 * rng.normal(size=(3, 16, 16))
    return torch.from_numpy(out), torch.from_numpy(y)


class WeightEMA:
    def __init__(self, model, decay=0.97):
        self.decay = decay
        self.ema = copy.deepcopy(model)
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.ema.parameters(), model.parameters()):
            e.mul_(self.decay).add_(p, alpha=1 - self.decay)


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


model = nn.Sequential(block(3, 16), nn.MaxPool2d(2), block(16, 32), nn.MaxPool2d(2), block(32, 32),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
x_train, y_train = make_images(2000)
x_val, y_val = make_images(500)
ema = WeightEMA(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
steps = 250
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
ce = nn.CrossEntropyLoss()

for step in range(steps):
    model.train()
    idx = torch.randint(0, 2000, (64,))
    loss = ce(model(x_train[idx]), y_train[idx])
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    ema.update(model)
    if step % 50 == 0:
        print("step", step, "loss", round(loss.item(), 4))

ema.ema.eval()
with torch.no_grad():
    err = (ema.ema(x_val).argmax(1) != y_val).float().mean().item()
print("FINAL", err)
