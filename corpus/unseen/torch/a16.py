"""Half-precision forward/backward with fp32 master weights and a hand-made dynamic loss scale."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler


class DynamicScale:
    def __init__(self, init=2.0 ** 24, growth_interval=50):
        self.value, self.interval, self.good, self.skipped = init, growth_interval, 0, 0

    def update(self, overflow):
        if overflow:
            self.value, self.good = self.value / 2, 0
            self.skipped += 1
        else:
            self.good += 1
            if self.good % self.interval == 0:
                self.value *= 2


class MasterSGD:
    def __init__(self, half_params, lr, momentum=0.9):
        self.half = list(half_params)
        self.master = [p.detach().float().clone() for p in self.half]
        self.buf = [torch.zeros_like(m) for m in self.master]
        self.lr, self.momentum = lr, momentum

    def step(self, scale):
        grads = [p.grad.float() / scale for p in self.half]
        if any(not torch.isfinite(g).all() for g in grads):
            return False
        for p, m, b, g in zip(self.half, self.master, self.buf, grads):
            b.mul_(self.momentum).add_(g)
            m.add_(b, alpha=-self.lr)
            p.data.copy_(m)
        return True

    def zero_grad(self):
        for p in self.half:
            p.grad = None


torch.manual_seed(0)
X, y = load_wine(return_X_y=True)
X = torch.tensor(StandardScaler().fit_transform(X)).half()
y = torch.tensor(y)
net = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 3)).half()
opt, scaler = MasterSGD(net.parameters(), lr=0.05), DynamicScale()

losses = []
for it in range(150):
    idx = torch.randint(0, len(X), (64,))
    loss = F.cross_entropy(net(X[idx]).float(), y[idx])
    opt.zero_grad()
    (loss * scaler.value).backward()
    ok = opt.step(scaler.value)
    scaler.update(not ok)
    losses.append(loss.item())
    if it % 15 == 0:
        print(f"{it:3d} loss {loss.item():.4f} scale {scaler.value:.0f} skipped {scaler.skipped}")

with torch.no_grad():
    acc = (net(X).argmax(1) == y).float().mean().item()
print("accuracy", acc, "skipped", scaler.skipped)
assert scaler.skipped > 0 and losses[-1] < losses[0]
assert all(torch.isfinite(m).all() for m in opt.master)
