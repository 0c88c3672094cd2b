import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def student_net():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


@torch.no_grad()
def ema_update(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s, alpha=1 - decay)


def ramp(step, length):
    return math.exp(-5 * (1 - min(1.0, step / length)) ** 2)


def noisy(x):
    return x + 0.15 * torch.randn_like(x)


def main(steps=400):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    x_lab, y_lab = x[:100], y[:100]
    x_unl = x[100:1300]
    x_te, y_te = x[1300:], y[1300:]

    student = student_net()
    teacher = copy.deepcopy(student)
    for p in teacher.parameters():
        p.requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=2e-3)
    for step in range(steps):
        il = torch.randint(0, len(x_lab), (32,))
        iu = torch.randint(0, len(x_unl), (96,))
        sup = F.cross_entropy(student(noisy(x_lab[il])), y_lab[il])
        with torch.no_grad():
            goal = teacher(noisy(x_unl[iu])).softmax(-1)
        cons = F.mse_loss(student(noisy(x_unl[iu])).softmax(-1), goal)
        loss = sup + 4.0 * ramp(step, 200) * cons
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema_update(teacher, student, min(0.98, 1 - 1 / (step + 1)))
        if step % 40 == 0:
            print(f"{step:4d} sup {sup.item():.4f} cons {cons.item():.5f} weight {4 * ramp(step, 200):.4f}")
    for name, net in (("student", student), ("teacher", teacher)):
        net.eval()
        with torch.no_grad():
            print(f"{name} test acc {(net(x_te).argmax(1) == y_te).float().mean().item():.3f}")


if __name__ == "__main__":
    main()
