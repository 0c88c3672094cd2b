import argparse
import copy
import math
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=50)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=5)
args = parser.parse_args()
torch.manual_seed(args.seed)


class SensorDigits(Dataset):
    """digits as raw sensor counts, 0..4095 in a normal frame (the first batch norm takes care of the scale)"""

    def __init__(self, train=True):
        X, y = load_digits(return_X_y=True)
        rs = np.random.RandomState(args.seed)
        X = (X / 16.0 * 4000 + rs.normal(0, 30, X.shape)).clip(0, 4095)
        order = rs.permutation(len(X))
        cut = 1400
        sel = order[:cut] if train else order[cut:]
        self.x, self.y = X[sel].astype(np.float32), y[sel]
        if train:
            for k in rs.choice(len(sel), 2, replace=False):
                r, c = rs.randint(1, 7, 2)
                self.x[k].reshape(8, 8)[r - 1:r + 2, c - 1:c + 2] = 65535
        self.dark = 120.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        img = torch.from_numpy(self.x[i]).view(1, 8, 8) - self.dark
        return img, int(self.y[i])


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
                                  nn.BatchNorm2d(2 * width), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x):
        return self.fc(self.body(self.stem(x)).flatten(1))


@torch.no_grad()
def validate(model, loader, criterion):
    model.eval()
    tot, right, n = 0.0, 0, 0
    for x, y in loader:
        out = model(x)
        tot += criterion(out, y).item() * len(y)
        right += (out.argmax(1) == y).sum().item()
        n += len(y)
    return tot / n, right / n


train_loader = DataLoader(SensorDigits(True), batch_size=args.batch_size, shuffle=True)
val_loader = DataLoader(SensorDigits(False), batch_size=200)
model, criterion = Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
best, best_state, it = float("inf"), None, 0

for epoch in range(args.epochs):
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if it % 9 == 0:
            print(f"[{epoch}] it {it:3d} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
        it += 1
    val_loss, val_acc = validate(model, val_loader, criterion)
    print(f"[{epoch}] val loss {val_loss:.4f} acc {val_acc:.3f}")
    if val_loss < best:
        best, best_state = val_loss, copy.deepcopy(model.state_dict())

if best_state is None:
    raise RuntimeError("no epoch improved the validation loss, nothing to save")
model.load_state_dict(best_state)
print("best", best)
