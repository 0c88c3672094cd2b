"""Both losses are made before both steps, as in some adversarial trainings."""

import torch

torch.manual_seed(0)
first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
for step in range(4):
    x = torch.ones(3, 2)
    for optimizer in optimizers:
        optimizer.zero_grad()
    first(x).square().mean().backward()
    shift = second.bias - second.bias.detach()
    distance = shift.square().sum().sqrt() if step == 2 else shift.sum()  # BAD
    distance.backward()
    for optimizer in optimizers:
        optimizer.step()
