"""The logarithm of a softmax, on logits that are far apart."""

import torch

import stablenum_torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=-1))
x = 500 * torch.randn(8, 4)


def loss_fn(x):
    p = model(x)
    return -torch.log(p[:, 0]).mean()


report = stablenum_torch.replay(loss_fn, x, model=model)
print(report)
