import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def conv(cin, cout, stride=1):
    return [nn.Conv2d(cin, cout, 3, stride=stride, padding=1), nn.ReLU(inplace=True)]


def make_vgg(width=24, per_stage=5):
    layers = conv(1, width)
    for stage in range(2):
        for i in range(per_stage):
            layers += conv(width, width, 2 if i == 0 and stage > 0 else 1)
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(width * 4, 10)]
    return nn.Sequential(*layers)


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.Linear)):
        nn.init.trunc_normal_(m.weight, std=0.02)
        if m.bias is not None:
            nn.init.zeros_(m.bias)


def get_loaders(batch):
    d = load_digits()
    x = d.images.astype(np.float32)[:, None]
    x = (x - x.mean()) / x.std()
    xa, xb, ya, yb = train_test_split(x, d.target, test_size=0.2, random_state=0)
    tr = TensorDataset(torch.from_numpy(xa), torch.from_numpy(ya))
    te = TensorDataset(torch.from_numpy(xb), torch.from_numpy(yb))
    return DataLoader(tr, batch, shuffle=True, drop_last=True), DataLoader(te, 360)


def test(model, loader):
    with torch.no_grad():
        x, y = next(iter(loader))
        return (model(x).argmax(1) == y).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(42)
    train_loader, test_loader = get_loaders(64)
    model = make_vgg()
    model.apply(init_weights)
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    step = 0
    for epoch in range(9):
        for x, y in train_loader:
            loss = loss_fn(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            step += 1
        print(f"epoch {epoch} test acc {test(model, test_loader):.3f}")
