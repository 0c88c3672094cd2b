import torch as th
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

th.manual_seed(42)


class LeNetish(nn.Module):
    def __init__(self, n_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 64),
            nn.ReLU(inplace=True),
            nn.Linear(64, n_classes),
            nn.Softmax(dim=1),
        )

    def forward(self, x):
        return self.classifier(self.features(x))


def evaluate(model, loader):
    model.eval()
    hit = n = 0
    with th.no_grad():
        for x, y in loader:
            hit += (model(x).argmax(1) == y).sum().item()
            n += len(y)
    model.train()
    return hit / n


def main():
    d = load_digits()
    ds = TensorDataset(th.tensor(d.images, dtype=th.float32).unsqueeze(1) / 16, th.tensor(d.target))
    train_ds, test_ds = random_split(ds, [1400, len(ds) - 1400])
    train_dl = DataLoader(train_ds, batch_size=64, shuffle=True)
    test_dl = DataLoader(test_ds, batch_size=256)
    model = LeNetish()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(8):
        seen = 0.0
        for x, y in train_dl:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            seen += loss.item()
        print(f"Epoch {epoch + 1}: loss {seen / len(train_dl):.4f}, accuracy {evaluate(model, test_dl):.2%}")
    print("final metric: acc %.4f" % evaluate(model, test_dl))


if __name__ == "__main__":
    main()
