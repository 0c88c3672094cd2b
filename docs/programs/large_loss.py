"""A loss of 1e10, and clipping"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 10)
y = x.sum(dim=1, keepdim=True)
model = nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for _ in range(10):
    error = nn.functional.mse_loss(model(x), y).item()
    loss = torch.tensor(1e10 * error)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 10.0)
    optimizer.step()
