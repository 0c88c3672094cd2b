import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from sklearn.datasets import load_digits


class SmallConvNet(nn.Module):
    def __init__(self, width=16, classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(2 * width * 4, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


class Trainer:
    def __init__(self, model, train_loader, val_loader, epochs=12, lr=0.05):
        self.model = model
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.epochs = epochs
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9,
                                         weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.8)

    def train_epoch(self):
        self.model.train()
        total, n = 0.0, 0
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            total += loss.item() * len(x)
            n += len(x)
        return total / n

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        hits = sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.val_loader)
        return hits / len(self.val_loader.dataset)

    def fit(self):
        for epoch in range(self.epochs):
            loss = self.train_epoch()
            acc = self.validate()
            print(f"epoch {epoch:2d}  train loss {loss:.4f}  val acc {acc:.3f}")


def main():
    torch.manual_seed(3)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    x = (x - x.mean()) / x.std()
    y = torch.tensor(digits.target)
    train, val = random_split(TensorDataset(x, y), [1437, 360],
                              generator=torch.Generator().manual_seed(0))
    trainer = Trainer(SmallConvNet(),
                      DataLoader(train, batch_size=64, shuffle=True),
                      DataLoader(val, batch_size=128))
    trainer.fit()


if __name__ == "__main__":
    main()
