import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, Dataset


class Tabular(Dataset):
    def __init__(self, x, y):
        self.x = torch.from_numpy(x.astype(np.float32))
        self.y = torch.from_numpy(y.astype(np.float32))

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def prepare(seed=0):
    data = load_breast_cancer()
    x_tr, x_te, y_tr, y_te = train_test_split(
        data.data, data.target, test_size=0.25, random_state=seed, stratify=data.target
    )
    return Tabular(x_tr, y_tr), Tabular(x_te, y_te)


def build_model(features):
    return nn.Sequential(
        nn.Linear(features, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 1),
    )


def accuracy(model, ds):
    model.eval()
    with torch.no_grad():
        return ((model(ds.x).squeeze(1) > 0).float() == ds.y).float().mean().item()


def main():
    torch.manual_seed(0)
    train_ds, test_ds = prepare()
    model = build_model(train_ds.x.shape[1])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    loader = DataLoader(train_ds, batch_size=32, shuffle=True, drop_last=True)
    for epoch in range(20):
        model.train()
        total = 0.0
        for x, y in loader:
            loss = criterion(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        if epoch % 2 == 1:
            print(f"epoch {epoch + 1:2d} loss {total / len(loader):.4f} test acc {accuracy(model, test_ds):.3f}")


if __name__ == "__main__":
    main()
