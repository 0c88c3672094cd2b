import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


def conv_bn(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(cout, eps=1e-3, momentum=0.001),
        nn.ReLU(inplace=True))


class DigitNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            conv_bn(1, 16), conv_bn(16, 16), conv_bn(16, 32, 2), conv_bn(32, 32), conv_bn(32, 64, 2))
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(self.layers(x).mean(dim=(2, 3)))


class Experiment:
    def __init__(self, seed=25):
        torch.manual_seed(seed)
        d = load_digits()
        x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1)
        y = torch.tensor(d.target)
        p = torch.randperm(len(x))
        self.train_set = (x[p[:1400]], y[p[:1400]])
        self.valid_set = (x[p[1400:]], y[p[1400:]])
        self.model = DigitNet()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def train_epoch(self, bs=50):
        self.model.train()
        x, y = self.train_set
        total = 0.0
        for idx in torch.randperm(len(x)).split(bs):
            loss = F.cross_entropy(self.model(x[idx]), y[idx])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item() * len(idx)
        return total / len(x)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        x, y = self.valid_set
        out = self.model(x)
        return F.cross_entropy(out, y).item(), (out.argmax(1) == y).float().mean().item()


exp = Experiment()
for e in range(5):
    tr = exp.train_epoch()
    vl, va = exp.validate()
    print(f"epoch {e}  train loss {tr:.4f}  valid loss {vl:.4f}  valid acc {va:.3f}")
