"""A square root whose result `where` discards."""

import torch

import stablenum_torch


def loss_fn(x):
    root = torch.sqrt(x)
    return torch.where(x > 0, root, torch.zeros_like(x)).sum()


x = torch.tensor([4.0, 0.0, 1.0], requires_grad=True)
report = stablenum_torch.replay(loss_fn, x)
print(report)
