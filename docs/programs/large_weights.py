"""Weights between 1 and 10"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 10)
y = x.sum(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
for parameter in model.parameters():
    nn.init.uniform_(parameter, 1, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for _ in range(10):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
