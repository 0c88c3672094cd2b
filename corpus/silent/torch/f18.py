import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(),
        )

    def forward(self, x):
        return self.net(x)


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(256, 10)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            f = self.backbone(x)
        return self.head(f)


def main():
    torch.manual_seed(7)
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(d.target)
    source, target = y < 5, y >= 5

    backbone = Backbone()
    pre = nn.Sequential(backbone, nn.Linear(256, 5))
    opt = torch.optim.Adam(pre.parameters(), lr=2e-3)
    for x_b, y_b in DataLoader(TensorDataset(x[source], y[source]), 64, shuffle=True):
        loss = F.cross_entropy(pre(x_b), y_b)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"source task, last loss {loss.item():.4f}")

    for p in backbone.parameters():
        p.requires_grad = False
    model = Classifier(backbone)
    opt = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1, momentum=0.9)
    xt, yt = x[target], y[target]
    loader = DataLoader(TensorDataset(xt[:640], yt[:640]), 64, shuffle=True)
    for epoch in range(12):
        model.train()
        for x_b, y_b in loader:
            loss = F.cross_entropy(model(x_b), y_b)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            acc = (model(xt[640:]).argmax(1) == yt[640:]).float().mean()
        print(f"epoch {epoch:2d} loss {loss.item():.4f} target acc {acc.item():.3f}")


if __name__ == "__main__":
    main()
