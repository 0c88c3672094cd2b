"""An optimizer whose state went bad a few steps ago."""

import torch

import stablenum_torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.named_parameters(), lr=1e-3)
x = torch.randn(8, 4)


def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


step()
optimizer.state[model.weight]["exp_avg_sq"][0, 0] *= -1e6  # a flipped bit, a bad restore
report = stablenum_torch.replay(step, model=model, optimizer=optimizer)
print(report)
