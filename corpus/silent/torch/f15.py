import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split


def unit(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(cout),
        nn.ReLU(inplace=True),
    )


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            unit(1, 16), unit(16, 16), unit(16, 16),
            unit(16, 24, 2), unit(24, 24), unit(24, 24),
            unit(24, 32, 2), unit(32, 32), unit(32, 32),
        )
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc(self.trunk(x).mean((2, 3)))


class Experiment:
    def __init__(self, seed=0, lr=0.05, batch=64):
        torch.manual_seed(seed)
        d = load_digits()
        x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
        full = TensorDataset(x, torch.tensor(d.target))
        tr, va = random_split(full, [1400, len(full) - 1400])
        self.train_dl = DataLoader(tr, batch, shuffle=True, drop_last=True)
        self.valid_dl = DataLoader(va, 256)
        self.net = ConvNet()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        hits, loss, n = 0, 0.0, 0
        for x, y in self.valid_dl:
            out = self.net(x)
            loss += F.cross_entropy(out, y, reduction="sum").item()
            hits += (out.argmax(1) == y).sum().item()
            n += len(y)
        return loss / n, hits / n

    def train_epoch(self):
        last = 0.0
        for x, y in self.train_dl:
            loss = F.cross_entropy(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            last = loss.item()
        return last

    def run(self, epochs):
        loss, acc = self.validate()
        print(f"untrained: val loss {loss:.3f} acc {acc:.3f}")
        for e in range(epochs):
            tr = self.train_epoch()
            loss, acc = self.validate()
            print(f"epoch {e}: train loss {tr:.3f} val loss {loss:.3f} acc {acc:.3f}")


if __name__ == "__main__":
    Experiment().run(epochs=6)
