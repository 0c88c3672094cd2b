"""Deep residual ConvNet on 8x8 digits; every branch is switched off at the start."""
import torch
from torch import nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class Branch(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.a = nn.Conv2d(ch, ch, 3, padding=1)
        self.b = nn.Conv2d(ch, ch, 3, padding=1)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.b(F.relu(self.a(F.relu(x))))


class DeepNet(nn.Module):
    def __init__(self, ch=16, n=8):
        super().__init__()
        self.inp = nn.Conv2d(1, ch, 3, padding=1)
        self.first = nn.Sequential(*[Branch(ch) for _ in range(n // 2)])
        self.second = nn.Sequential(*[Branch(ch) for _ in range(n - n // 2)])
        self.fc = nn.Linear(ch * 4, 10)
        nn.init.zeros_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        x = F.avg_pool2d(self.first(self.inp(x)), 2)
        x = F.avg_pool2d(self.second(x), 2)
        return self.fc(x.flatten(1))


def get_data():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    y = torch.tensor(d.target)
    p = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[p[:1400]], y[p[:1400]], x[p[1400:]], y[p[1400:]]


if __name__ == "__main__":
    torch.manual_seed(6)
    x, y, xv, yv = get_data()
    net = DeepNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=8e-3)
    for epoch in range(6):
        for i, idx in enumerate(torch.randperm(len(x)).split(64)):
            loss = F.cross_entropy(net(x[idx]), y[idx])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 0:
                print(f"epoch {epoch} batch {i:2d} loss {loss.item():.4f}")
    with torch.no_grad():
        print("validation accuracy", (net(xv).argmax(1) == yv).float().mean().item())
