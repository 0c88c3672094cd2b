"""Finite gradients, and an update of 0 / 0."""

import torch

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0)
x = torch.tensor([[1.0, 0.0, 2.0]])  # nothing ever reaches the second input
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()  # BAD
