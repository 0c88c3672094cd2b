"""A script that looks at its own loss: it never comes to a backward pass."""

import sys

import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    x = torch.tensor([[1.0, 2.0, float("nan") if step == 2 else 3.0]])  # BAD
    loss = model(x).square().mean()
    if not torch.isfinite(loss):
        sys.exit(3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
