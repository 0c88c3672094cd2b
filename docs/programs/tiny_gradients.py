"""Gradients of 1e-50 and Adam"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 10)
y = x.sum(dim=1, keepdim=True)
model = nn.Linear(10, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

for _ in range(50):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.grad *= 1e-50
    optimizer.step()
