"""A library that looks before anybody else does."""

import torch

model = torch.nn.Linear(3, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    temperature = torch.tensor(1.0 - step)
    logits = model(torch.ones(2, 3)) / temperature  # BAD
    torch.multinomial(torch.softmax(logits.detach(), dim=-1), 1)
    optimizer.zero_grad()
    logits.square().mean().backward()
    optimizer.step()
