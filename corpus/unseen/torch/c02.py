import math
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

torch.manual_seed(3)
np.random.seed(3)


class MishFn(torch.autograd.Function):
    """memory efficient mish: only the input is kept for backward"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx, grad_out):
        x, = ctx.saved_tensors
        e = torch.exp(x)
        omega = 4 * (x + 1) + 4 * e ** 2 + e ** 3 + e * (4 * x + 6)
        delta = 2 * e + e ** 2 + 2
        return grad_out * e * omega / delta ** 2


class Mish(nn.Module):
    def forward(self, x):
        return MishFn.apply(x)


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), Mish())


class TinyCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv_block(1, 12), nn.MaxPool2d(2), conv_block(12, 24), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24 * 4, 48), Mish(), nn.Linear(48, 10))

    def forward(self, x):
        return self.head(self.features(x))


def accuracy(net, x, y):
    net.eval()
    with torch.no_grad():
        acc = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return acc


def onecycle(step, total, peak):
    up = int(0.3 * total)
    if step < up:
        return peak * (0.05 + 0.95 * step / up)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - up) / (total - up)))


X, y = load_digits(return_X_y=True)
Xtr, Xte, ytr, yte = train_test_split(X, y, test_size=0.25, random_state=0, stratify=y)
to_img = lambda a: torch.tensor(a, dtype=torch.float32).view(-1, 1, 8, 8)
Xtr, Xte = to_img(Xtr), to_img(Xte)
ytr, yte = torch.tensor(ytr), torch.tensor(yte)

net = TinyCNN()
opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
BS, EPOCHS = 64, 6
total = EPOCHS * (len(Xtr) // BS)
step = 0
for epoch in range(EPOCHS):
    order = torch.randperm(len(Xtr))
    run = 0.0
    for b in range(len(Xtr) // BS):
        idx = order[b * BS:(b + 1) * BS]
        for g in opt.param_groups:
            g["lr"] = onecycle(step, total, 0.01)
        loss = F.cross_entropy(net(Xtr[idx]), ytr[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        run += loss.item()
        step += 1
        if step % 7 == 0:
            print("step %d loss %.4f" % (step, loss.item()))
    print("epoch %d  train loss %.4f  test acc %.3f" % (epoch, run / (b + 1), accuracy(net, Xte, yte)))
