"""Causal attention: full of -inf, and nothing wrong."""

import torch

import stablenum_torch

torch.manual_seed(0)
q, k, v = torch.randn(3, 2, 4, 8).requires_grad_()
mask = torch.full((4, 4), float("-inf")).triu(1)


def loss_fn(q, k, v):
    return (torch.softmax(q @ k.mT + mask, dim=-1) @ v).square().mean()


report = stablenum_torch.replay(loss_fn, q, k, v)
print(report)
