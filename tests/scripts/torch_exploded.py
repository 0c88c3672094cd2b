"""A batch that is far too large blows up the weights; the loss overflows a step later."""

import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x = torch.ones(8, 4) * (1e6 if step == 3 else 0.1)
    loss = ((model(x) * model(x)) ** 2).mean()  # BAD
    optimizer.zero_grad()
    (loss if step != 3 else loss * 1e-8).backward()
    optimizer.step()
