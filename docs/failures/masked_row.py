"""Attention over a sentence that consists only of padding."""

import torch

import stablenum_torch


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.mT) / 8**0.5
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return weights @ v


torch.manual_seed(0)
model = Attention()
batch = torch.randn(2, 3, 8)
mask = torch.tensor([[True, True, False], [False, False, False]])
report = stablenum_torch.replay(lambda x, m: model(x, m).square().mean(), batch, mask, model=model)
print(report)
