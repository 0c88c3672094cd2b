import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self, n_in, n_hidden=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(n_in, n_hidden),
            nn.ReLU(),
            nn.Linear(n_hidden, n_hidden),
            nn.ReLU(),
        )
        self.out = nn.Linear(n_hidden, 1)

    def forward(self, x):
        return torch.sigmoid(self.out(self.body(x))).squeeze(-1)


def train_one_epoch(model, loader, criterion, optimizer):
    model.train()
    total = 0.0
    for xb, yb in loader:
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(xb), yb)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(xb)
    return total / len(loader.dataset)


def main():
    torch.manual_seed(2)
    X, y = load_breast_cancer(return_X_y=True)
    X = torch.tensor(scale(X), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    perm = torch.randperm(len(X))
    tr, te = perm[:420], perm[420:]
    loader = DataLoader(TensorDataset(X[tr], y[tr]), batch_size=32, shuffle=True)
    model = Classifier(X.size(1))
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(15):
        tl = train_one_epoch(model, loader, criterion, optimizer)
        model.eval()
        with torch.no_grad():
            vl = criterion(model(X[te]), y[te]).item()
        print(f"epoch {epoch:2d}  train {tl:.4f}  valid {vl:.4f}")


if __name__ == "__main__":
    main()
