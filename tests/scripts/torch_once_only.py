"""Goes wrong in the first run alone: what it depends on is outside all generators."""

import sys
from pathlib import Path

import torch

marker = Path(sys.argv[1])
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.ones(1, 2)
    if step == 1 and not marker.exists():
        marker.write_text("was here")
        x = x / 0.0
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
