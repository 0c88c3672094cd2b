"""Stochastic weight averaging, with the statistics of batch normalisation computed again at the end."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def network():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return right


def main(epochs=14, swa_start=9):
    torch.manual_seed(0)
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16, torch.tensor(d.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    data = torch.utils.data.TensorDataset(x[:1400], y[:1400])
    loader = torch.utils.data.DataLoader(data, 64, shuffle=True, drop_last=True)
    model = network()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    averaged, swa_schedule = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    for epoch in range(epochs):
        total = 0.0
        for a, b in loader:
            loss = F.cross_entropy(model(a), b)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() / len(loader)
        if epoch >= swa_start:
            averaged.update_parameters(model)
            swa_schedule.step()
        else:
            schedule.step()
        if epoch % 3 == 0:
            print(f"epoch {epoch:2d} loss {total:.4f} test {accuracy(model, x[1400:], y[1400:]):.3f}")
    update_bn(loader, averaged)
    print(f"test accuracy {accuracy(model, x[1400:], y[1400:]):.3f} averaged {accuracy(averaged, x[1400:], y[1400:]):.3f}")


if __name__ == "__main__":
    main()
