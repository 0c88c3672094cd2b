"""A finite loss with a NaN gradient, in a module, from the third step on."""

import torch


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        root = torch.sqrt(x * self.weight.abs())  # BAD
        return torch.where(x > 0, root, torch.zeros_like(x))


model = torch.nn.Sequential(torch.nn.Linear(3, 3), Gate())
with torch.no_grad():
    model[0].weight.copy_(torch.eye(3))
    model[0].bias.zero_()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for step in range(5):
    x = torch.ones(2, 3)
    x[0, 0] = 2.0 - step
    if step == 2:
        x[0, 0] = 0.0
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
