import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class ResidualUnit(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1 = nn.Linear(dim, dim)
        self.fc2 = nn.Linear(dim, dim)
        self.alpha = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.fc1.bias)

    def forward(self, x):
        return x + self.alpha * self.fc2(F.relu(self.fc1(x)))


class DeepNet(nn.Module):
    def __init__(self, d_in, dim=64, depth=32, classes=10):
        super().__init__()
        self.stem = nn.Linear(d_in, dim)
        self.units = nn.ModuleList([ResidualUnit(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = self.stem(x)
        for u in self.units:
            x = u(x)
        return self.head(F.layer_norm(x, x.shape[-1:]))


def lr_at(step, warm=60, total=260):
    if step < warm:
        return step / warm
    return max(0.02, 1 - (step - warm) / (total - warm))


def main():
    torch.manual_seed(5)
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32) / 8.0 - 1.0
    y = torch.tensor(d.target)
    order = torch.randperm(len(x))
    tr, te = order[:1440], order[1440:]
    model = DeepNet(64)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lr_at)
    for step in range(260):
        idx = tr[torch.randint(0, len(tr), (96,))]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 40 == 0 or step == 259:
            print(f"{step:4d} lr {sched.get_last_lr()[0]:.2e} loss {loss.item():.4f}")
    with torch.no_grad():
        acc = (model(x[te]).argmax(1) == y[te]).float().mean()
    print("test acc", round(acc.item(), 4))


main()
