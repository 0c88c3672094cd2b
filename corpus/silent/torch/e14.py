import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

BN_DECAY = 0.999


class ConvUnit(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout, momentum=1 - BN_DECAY)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.u1 = ConvUnit(1, 16, 1)
        self.u2 = ConvUnit(16, 32, 2)
        self.u3 = ConvUnit(32, 32, 1)
        self.u4 = ConvUnit(32, 64, 2)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        x = self.u4(self.u3(self.u2(self.u1(x))))
        return self.fc(x.mean((2, 3)))


def load():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(d.target)
    p = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[p], y[p]
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def evaluate(model, x, y):
    model.eval()
    with torch.no_grad():
        out = model(x)
        res = F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()
    model.train()
    return res


def train(model, data, val, steps=240, batch=64):
    x, y = data
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=4e-3, total_steps=steps)
    model.train()
    for step in range(1, steps + 1):
        k = torch.randint(0, len(x), (batch,))
        loss = F.cross_entropy(model(x[k]), y[k])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 40 == 0 or step == 1:
            vl, va = evaluate(model, *val)
            print(f"step {step:3d} train loss {loss.item():.4f} val loss {vl:.4f} val acc {va:.3f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    tr, va = load()
    train(Net(), tr, va)
