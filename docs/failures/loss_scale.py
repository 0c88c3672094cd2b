"""A loss scale that is too high: expected, and fixed by a backoff."""

import torch

import stablenum_torch

torch.manual_seed(0)
model = torch.nn.Linear(16, 16).half()
x = torch.randn(4, 16).half()
report = stablenum_torch.replay(lambda: model(x).float().square().mean(), model=model, loss_scale=2.0**24)
print(report)
