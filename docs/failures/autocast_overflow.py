"""A square that float16 cannot hold, under autocast."""

import torch

import stablenum_torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
x = 200 * torch.randn(8, 64)


def step():
    with torch.autocast("cpu", torch.float16):
        hidden = model(x)
        energy = hidden @ hidden.mT
    return energy.mean()


report = stablenum_torch.replay(step, model=model)
print(report)
