"""The distance of a point to itself: a finite value without a derivative."""

import torch

import stablenum_torch


def contrastive(anchor, positive):
    distance = (anchor - positive).pow(2).sum(-1).sqrt()
    return distance.mean()


anchor = torch.ones(4, 3, requires_grad=True)
positive = torch.ones(4, 3)
report = stablenum_torch.replay(contrastive, anchor, positive)
print(report)
