"""Disease progression from ten clinical measurements."""
import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


def load():
    X, y = load_diabetes(return_X_y=True)
    X = (X - X.mean(0)) / X.std(0)
    y = (y - y.mean()) / y.std()
    order = np.random.RandomState(3).permutation(len(X))
    X = torch.tensor(X[order], dtype=torch.float32)
    y = torch.tensor(y[order], dtype=torch.float32)
    return X[:340], y[:340], X[340:], y[340:]


def build(width=48):
    return nn.Sequential(
        nn.Linear(10, width), nn.SiLU(),
        nn.Linear(width, width), nn.SiLU(),
        nn.Linear(width, 1),
    )


def squared_error(pred, target):
    return ((pred - target) ** 2).mean()


def r2(model, X, y):
    model.eval()
    with torch.no_grad():
        out = model(X).flatten()
    model.train()
    return (1 - ((out - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()).item()


def main():
    Xtr, ytr, Xte, yte = load()
    loader = DataLoader(TensorDataset(Xtr, ytr), batch_size=34, shuffle=True)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    for epoch in range(20):
        running = 0.0
        for xb, yb in loader:
            opt.zero_grad()
            loss = squared_error(model(xb), yb)
            loss.backward()
            opt.step()
            running += loss.item()
        if epoch % 4 == 3:
            print(f"epoch {epoch + 1:2d}  train loss {running / len(loader):.4f}")
    print(f"R2 train {r2(model, Xtr, ytr):.3f}  test {r2(model, Xte, yte):.3f}")


if __name__ == "__main__":
    main()
