from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler


@dataclass
class Hparams:
    width: int = 96
    layers: int = 10
    init_std: float = 0.02
    lr: float = 1e-3
    steps: int = 300
    batch: int = 128
    seed: int = 0


class DeepMLP(nn.Module):
    def __init__(self, hp, d_in, d_out):
        super().__init__()
        sizes = [d_in] + [hp.width] * hp.layers
        mods = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            mods += [nn.Linear(a, b), nn.ReLU()]
        self.body = nn.Sequential(*mods)
        self.head = nn.Linear(hp.width, d_out)
        self.std = hp.init_std
        self.apply(self._init)

    def _init(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, mean=0.0, std=self.std)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.head(self.body(x))


def load():
    d = load_digits()
    x = StandardScaler().fit_transform(d.data)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(d.target)
    return x[:1400], y[:1400], x[1400:], y[1400:]


def train(hp):
    torch.manual_seed(hp.seed)
    xtr, ytr, xte, yte = load()
    net = DeepMLP(hp, 64, 10)
    opt = torch.optim.AdamW(net.parameters(), lr=hp.lr)
    for step in range(hp.steps):
        pick = torch.randperm(len(xtr))[: hp.batch]
        loss = F.cross_entropy(net(xtr[pick]), ytr[pick])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            print(f"[{step:4d}] loss={loss.item():.4f}")
    with torch.no_grad():
        print(f"test acc = {(net(xte).argmax(1) == yte).float().mean().item():.3f}")


if __name__ == "__main__":
    train(Hparams())
