"""Knowledge distillation: conv teacher (label smoothing) -> small weight-normalised ReLU student."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(77)


def dataset():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    p = torch.randperm(len(x))
    return (x[p[:1400]], y[p[:1400]]), (x[p[1400:]], y[p[1400:]])


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.c2, self.b2 = nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 16, 10)

    def forward(self, x):
        x = F.relu(self.b1(self.c1(x)))
        x = F.relu(self.b2(self.c2(x)))
        return self.fc(x.flatten(1))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.f1 = weight_norm(nn.Linear(64, 48))
        self.f2 = weight_norm(nn.Linear(48, 10))

    def forward(self, x):
        return self.f2(F.relu(self.f1(x.flatten(1))))


@torch.no_grad()
def score(m, x, y):
    m.eval()
    a = (m(x).argmax(1) == y).float().mean().item()
    m.train()
    return a


(xtr, ytr), (xte, yte) = dataset()

teacher = Teacher()
opt = torch.optim.Adam(teacher.parameters(), lr=2e-3)
for step in range(80):
    i = torch.randint(0, len(xtr), (64,))
    loss = F.cross_entropy(teacher(xtr[i]), ytr[i], label_smoothing=0.1)
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 20 == 0:
        print(f"teacher {step:3d} loss {loss.item():.4f}")
print("teacher acc %.3f" % score(teacher, xte, yte))

for p in teacher.parameters():
    p.requires_grad_(False)
teacher.eval()

TEMP = 3.0
student = Student()
opt = torch.optim.Adam(student.parameters(), lr=5e-3)
for step in range(220):
    i = torch.randint(0, len(xtr), (64,))
    with torch.no_grad():
        t = teacher(xtr[i])
    s = student(xtr[i])
    kd = F.kl_div(F.log_softmax(s / TEMP, 1), F.softmax(t / TEMP, 1), reduction="batchmean") * TEMP ** 2
    loss = 0.7 * kd + 0.3 * F.cross_entropy(s, ytr[i])
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 20 == 0:
        print(f"student {step:3d} loss {loss.item():.4f} kd {kd.item():.4f}")
print("final metric: student acc %.4f, loss %.4f" % (score(student, xte, yte), loss.item()))
