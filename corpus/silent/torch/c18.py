import torch
import torch.nn as nn
from sklearn.datasets import load_breast_cancer


class Net(nn.Module):
    def __init__(self, n_features, bn_momentum):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_features, 64), nn.BatchNorm1d(64, momentum=bn_momentum), nn.ReLU(),
            nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=bn_momentum), nn.ReLU(),
            nn.Linear(64, 64), nn.BatchNorm1d(64, momentum=bn_momentum), nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(1)


class Trainer:
    def __init__(self, model, lr, batch_size):
        self.model = model
        self.batch_size = batch_size
        self.criterion = nn.BCEWithLogitsLoss()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def train_epoch(self, X, y):
        self.model.train()
        perm = torch.randperm(len(X))
        losses = []
        for start in range(0, len(X) - self.batch_size + 1, self.batch_size):
            idx = perm[start:start + self.batch_size]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(X[idx]), y[idx])
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def validate(self, X, y):
        self.model.eval()
        out = self.model(X)
        return self.criterion(out, y).item(), ((out > 0).float() == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(8)
    X, y = load_breast_cancer(return_X_y=True)
    X, y = torch.tensor(X, dtype=torch.float32).log1p(), torch.tensor(y, dtype=torch.float32)
    perm = torch.randperm(len(X))
    X, y = X[perm], y[perm]
    model = Net(X.shape[1], bn_momentum=0.001)
    trainer = Trainer(model, lr=1e-3, batch_size=32)
    for epoch in range(12):
        tl = trainer.train_epoch(X[:400], y[:400])
        vl, va = trainer.validate(X[400:], y[400:])
        print(f"epoch {epoch:2d} train loss {tl:.4f} val loss {vl:.4f} val acc {va:.3f}")
    print(f"final metric: val loss {vl:.4f} val acc {va:.4f}")
