import copy
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

torch.manual_seed(0)
d = load_digits()
X = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16.0
Y = torch.tensor(d.target)
perm = torch.randperm(len(X))
X, Y = X[perm], Y[perm]
lab_x, lab_y = X[:200], Y[:200]
unl_x = X[200:1400]
val_x, val_y = X[1400:], Y[1400:]


def net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10))


def jitter(x):
    dx, dy = torch.randint(-1, 2, (2,)).tolist()
    return torch.roll(x, (dx, dy), (2, 3)) + 0.05 * torch.randn_like(x)


student = net()
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)

opt = torch.optim.AdamW(student.parameters(), lr=4e-3)


@torch.no_grad()
def ema(decay):
    for pt, ps in zip(teacher.parameters(), student.parameters()):
        pt.mul_(decay).add_(ps, alpha=1 - decay)


for step in range(280):
    i = torch.randint(0, len(lab_x), (32,))
    j = torch.randint(0, len(unl_x), (64,))
    sup = F.cross_entropy(student(jitter(lab_x[i])), lab_y[i])
    with torch.no_grad():
        target = teacher(jitter(unl_x[j])).softmax(-1)
    cons = F.mse_loss(student(jitter(unl_x[j])).softmax(-1), target)
    loss = sup + min(1.0, step / 80) * 3.0 * cons
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    ema(min(0.98, 1 - 1 / (step + 2)))
    if step % 30 == 0 or step == 279:
        with torch.no_grad():
            acc = (teacher(val_x).argmax(1) == val_y).float().mean()
        print(f"{step:4d} sup={sup.item():.4f} cons={cons.item():.5f} teacher_val_acc={acc:.3f}")
