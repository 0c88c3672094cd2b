import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from sklearn.datasets import load_digits


class ConvStack(nn.Module):
    """Plain VGG-like stack without normalisation."""

    def __init__(self, width=24, depth=9, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.body = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)])
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(width * 4, classes)
        self.apply(self._init)

    @staticmethod
    def _init(m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(m.weight, mean=0.0, std=0.02)
            nn.init.zeros_(m.bias)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for conv in self.body:
            x = torch.relu(conv(x))
        return self.head(self.pool(x).flatten(1))


def run():
    torch.manual_seed(7)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None]
    x = (x - x.mean()) / x.std()
    ds = TensorDataset(x, torch.tensor(d.target))
    train, test = random_split(ds, [1500, len(ds) - 1500])
    model = ConvStack()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    ce = nn.CrossEntropyLoss()
    for epoch in range(5):
        for x, y in DataLoader(train, batch_size=50, shuffle=True):
            loss = ce(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(test, batch_size=100))
        print(f"epoch {epoch}: train loss {loss.item():.4f}, test accuracy {hits / len(test):.3f}")


if __name__ == "__main__":
    run()
