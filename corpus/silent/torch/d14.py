import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Branch(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.c1 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(ch)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1, bias=False)
        self.b2 = nn.BatchNorm2d(ch)
        nn.init.zeros_(self.b2.weight)
        self.alpha = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        h = F.relu(self.b1(self.c1(x)))
        return x + self.alpha * self.b2(self.c2(h))


class DeepNet(nn.Module):
    def __init__(self, ch=16, depth=20):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.body = nn.Sequential(*[Branch(ch) for _ in range(depth)])
        self.head = nn.Linear(ch * 4, 10)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        h = self.body(self.stem(x))
        h = F.adaptive_avg_pool2d(F.relu(h), 2)
        return self.head(h.flatten(1))


def run():
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 8 - 1
    y = torch.tensor(d.target)
    perm = torch.randperm(len(x))
    x, y = x[perm], y[perm]
    net = DeepNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    steps = 120
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=steps)
    for step in range(steps):
        idx = torch.randint(0, 1400, (48,))
        loss = F.cross_entropy(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step:3d} loss {loss.item():.4f}")
    net.eval()
    with torch.no_grad():
        acc = (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item()
    print(f"FINAL loss {loss.item():.4f} acc {acc:.3f}")


if __name__ == "__main__":
    run()
