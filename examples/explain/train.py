"""Distances of points are learned, until the two points of a pair are the same."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--epochs", type=int, default=3)
options = parser.parse_args()


class Embed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    def forward(self, a, b):
        difference = self.layers(a) - self.layers(b)
        return difference.square().sum(dim=-1).sqrt()


torch.manual_seed(0)
model = Embed()
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
for epoch in range(options.epochs):
    for batch in range(20):
        a, b = torch.randn(2, 16, 4)
        if (epoch, batch) == (1, 7):
            b[3] = a[3]
        loss = (model(a, b) - (a - b).norm(dim=-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
