"""Small steps in float16"""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(64, 10).half()
y = x.sum(dim=1, keepdim=True)
model = nn.Linear(10, 1).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, eps=1e-4)

for _ in range(50):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
