"""Mean teacher: a few labelled sequences, many unlabelled, GRU student and averaged teacher."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class SeqNet(nn.Module):
    def __init__(self, hidden=32, classes=3):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x):
        _, h = self.gru(x)
        return self.fc(self.drop(h[-1]))


def waves(n, steps=24):
    kind = torch.randint(0, 3, (n,))
    t = torch.linspace(0, 1, steps)
    freq = torch.tensor([1.0, 2.0, 3.5])[kind].unsqueeze(1)
    phase = 6.28 * torch.rand(n, 1)
    return (torch.sin(6.28 * freq * t + phase) + 0.15 * torch.randn(n, steps)).unsqueeze(-1), kind


@torch.no_grad()
def ema_update(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(decay).add_(s, alpha=1 - decay)


def accuracy(net, x, y):
    net.eval()
    with torch.no_grad():
        acc = (net(x).argmax(1) == y).float().mean().item()
    net.train()
    return acc


torch.manual_seed(14)
student = SeqNet()
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad = False

lab_x, lab_y = waves(120)
pool, _ = waves(1000)
test_x, test_y = waves(600)
opt = torch.optim.Adam(student.parameters(), lr=8e-3)
for step in range(200):
    pick = torch.randint(0, len(lab_x), (32,))
    extra = pool[torch.randint(0, len(pool), (64,))]
    sup = F.cross_entropy(student(lab_x[pick]), lab_y[pick])
    with torch.no_grad():
        target = teacher(extra).softmax(-1)
    guess = student(extra + 0.05 * torch.randn_like(extra)).softmax(-1)
    ramp = min(1.0, step / 80)
    loss = sup + ramp * 2.0 * F.mse_loss(guess, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    ema_update(teacher, student, min(0.97, 1 - 1 / (step + 1)))
    if step % 25 == 0 or step == 199:
        print(f"step {step:3d} sup {sup.item():.4f} total {loss.item():.4f} "
              f"student {accuracy(student, test_x, test_y):.3f} teacher {accuracy(teacher, test_x, test_y):.3f}")
