"""A loss of 1e-9, and a loss scale"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 10)
y = x.sum(dim=1, keepdim=True)
model = nn.Linear(10, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-15)

for _ in range(50):
    loss = 1e-9 * nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    (1024 * loss).backward()
    for parameter in model.parameters():
        parameter.grad = (parameter.grad.half() / 1024).float()
    optimizer.step()
