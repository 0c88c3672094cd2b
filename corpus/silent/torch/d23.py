import numpy as np
import torch
from torch import nn
from sklearn.datasets import load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset


def build(n_in, n_out, hidden=(32, 32)):
    layers, last = [], n_in
    for h in hidden:
        layers += [nn.Linear(last, h), nn.Tanh()]
        last = h
    layers.append(nn.Linear(last, n_out))
    return nn.Sequential(*layers)


def prepare(seed=0, batch_size=16):
    data = load_wine()
    x_tr, x_te, y_tr, y_te = train_test_split(
        data.data.astype(np.float32), data.target, test_size=0.3,
        random_state=seed, stratify=data.target)
    scaler = StandardScaler().fit(x_tr)
    sets = []
    for x, y in ((x_tr, y_tr), (x_te, y_te)):
        scaler.transform(x)
        sets.append(TensorDataset(torch.as_tensor(np.asarray(x, dtype=np.float32)),
                                  torch.as_tensor(y)))
    return (DataLoader(sets[0], batch_size=batch_size, shuffle=True),
            DataLoader(sets[1], batch_size=256))


def score(model, loader):
    good = total = 0
    with torch.no_grad():
        for x, y in loader:
            good += (model(x).argmax(1) == y).sum().item()
            total += len(y)
    return good / total


def main():
    torch.manual_seed(0)
    train, test = prepare()
    model = build(13, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ce = nn.CrossEntropyLoss()
    for epoch in range(40):
        total, n = 0.0, 0
        for x, y in train:
            opt.zero_grad()
            loss = ce(model(x), y)
            loss.backward()
            opt.step()
            total += loss.item() * len(y)
            n += len(y)
        if epoch % 5 == 0 or epoch == 39:
            print(f"epoch {epoch:2d} loss {total / n:.4f} test acc {score(model, test):.3f}")
    print(f"FINAL loss {total / n:.4f} acc {score(model, test):.3f}")


if __name__ == "__main__":
    main()
