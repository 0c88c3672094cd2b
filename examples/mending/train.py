"""A loss that is NaN once a probability is 0."""

import torch

torch.manual_seed(0)
w = torch.zeros(4, requires_grad=True)
opt = torch.optim.SGD([w], lr=20.0)
x = torch.randn(64, 4)
y = (x.sum(1) > 0).float()

for _ in range(40):
    opt.zero_grad()
    p = torch.sigmoid(x @ w)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
    loss.backward()
    opt.step()
