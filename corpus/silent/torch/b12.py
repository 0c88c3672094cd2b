import logging

import torch
from sklearn.datasets import load_wine
from torch import nn

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("wine")


class Trainer:
    def __init__(self, model, data, lr=0.05, epochs=25, batch_size=16):
        self.model = model
        self.x, self.y = data
        self.epochs = epochs
        self.batch_size = batch_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=20, gamma=0.5)
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, xb, yb):
        loss = self.criterion(self.model(xb), yb)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            good = (self.model(self.x).argmax(1) == self.y).float().mean().item()
        self.model.train()
        return good

    def fit(self):
        for epoch in range(1, self.epochs + 1):
            losses = []
            for idx in torch.randperm(len(self.x)).split(self.batch_size):
                if len(idx) < self.batch_size:
                    continue
                losses.append(self.training_step(self.x[idx], self.y[idx]))
            self.scheduler.step()
            if epoch % 5 == 0:
                log.info("epoch %2d  loss %.4f  acc %.3f", epoch, sum(losses) / len(losses), self.evaluate())


def load():
    wine = load_wine()
    x = torch.tensor(wine.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(wine.target)


def main():
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))
    Trainer(model, load()).fit()


if __name__ == "__main__":
    main()
