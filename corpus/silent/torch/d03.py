import torch
import torch.nn as nn
from dataclasses import dataclass
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    depth: int = 14
    width: int = 96
    lr: float = 5e-4
    batch_size: int = 64
    epochs: int = 12
    seed: int = 7


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x))


class Classifier(nn.Module):
    def __init__(self, cfg, n_in=64, n_out=10):
        super().__init__()
        self.stem = nn.Linear(n_in, cfg.width)
        self.blocks = nn.Sequential(*[Block(cfg.width) for _ in range(cfg.depth)])
        self.head = nn.Linear(cfg.width, n_out)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        return self.head(self.blocks(torch.relu(self.stem(x))))


def get_loaders(cfg):
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32)
    x = (x - x.mean()) / x.std()
    y = torch.tensor(d.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(cfg.seed))
    x, y = x[order], y[order]
    train = TensorDataset(x[:1400], y[:1400])
    test = TensorDataset(x[1400:], y[1400:])
    return (DataLoader(train, cfg.batch_size, shuffle=True, drop_last=True),
            DataLoader(test, 512))


def evaluate(model, loader):
    model.eval()
    hit = n = 0
    with torch.no_grad():
        for xb, yb in loader:
            hit += (model(xb).argmax(-1) == yb).sum().item()
            n += len(yb)
    model.train()
    return hit / n


def train(cfg):
    torch.manual_seed(cfg.seed)
    tr, te = get_loaders(cfg)
    model = Classifier(cfg)
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        total = 0.0
        for xb, yb in tr:
            opt.zero_grad(set_to_none=True)
            loss = criterion(model(xb), yb)
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch:2d} train loss {total / len(tr):.4f}")
    print(f"FINAL train_loss {total / len(tr):.4f} acc {evaluate(model, te):.3f}")


if __name__ == "__main__":
    train(Config())
