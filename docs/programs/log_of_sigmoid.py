"""A cross-entropy written with log"""

import torch
from torch import nn

torch.manual_seed(0)
x = 1000 * torch.randn(64, 10)
y = (x.sum(dim=1, keepdim=True) > 0).float()
model = nn.Sequential(nn.Linear(10, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(10):
    p = model(x)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
