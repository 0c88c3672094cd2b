import copy
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2),
                                 nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x):
        return self.net(x)


class MeanTeacher:
    def __init__(self, decay=0.98, ramp=120, weight=3.0):
        self.student = Student()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.decay, self.ramp, self.weight = decay, ramp, weight
        self.opt = torch.optim.SGD(self.student.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def consistency_weight(self, step):
        f = min(1.0, step / self.ramp)
        return self.weight * math.exp(-8 * (1 - f) ** 2)

    def step(self, step, xl, yl, xu):
        noisy = xu + 0.1 * torch.randn_like(xu)
        with torch.no_grad():
            soft = self.teacher(xu + 0.1 * torch.randn_like(xu)).softmax(-1)
        sup = F.cross_entropy(self.student(xl + 0.1 * torch.randn_like(xl)), yl)
        cons = F.mse_loss(self.student(noisy).softmax(-1), soft)
        loss = sup + self.consistency_weight(step) * cons
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        with torch.no_grad():
            d = min(self.decay, 1 - 1 / (step + 1))
            for t, s in zip(self.teacher.parameters(), self.student.parameters()):
                t.mul_(d).add_(s, alpha=1 - d)
        return sup.item(), cons.item()


def main():
    torch.manual_seed(0)
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32) / 16
    y = torch.tensor(d.target)
    order = torch.randperm(len(x))
    lab, unl, test = order[:100], order[100:1400], order[1400:]
    mt = MeanTeacher()
    for step in range(300):
        i = lab[torch.randint(0, len(lab), (32,))]
        j = unl[torch.randint(0, len(unl), (96,))]
        sup, cons = mt.step(step, x[i], y[i], x[j])
        if step % 50 == 0 or step == 299:
            mt.student.eval(), mt.teacher.eval()
            with torch.no_grad():
                acc = [(m(x[test]).argmax(1) == y[test]).float().mean().item()
                       for m in (mt.student, mt.teacher)]
            mt.student.train(), mt.teacher.train()
            print(f"{step:3d} sup {sup:.4f} cons {cons:.5f} student {acc[0]:.3f} teacher {acc[1]:.3f}")


if __name__ == "__main__":
    main()
