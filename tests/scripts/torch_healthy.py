"""Masks of -inf, and a loss scale that is too high at first: nothing is wrong."""

import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
mask = torch.full((5, 5), float("-inf")).triu(1)
best = float("inf")
for _ in range(4):
    x = torch.randn(5, 4)
    weights = torch.softmax(model(x) @ x.T + mask, dim=-1)
    loss = 1e3 * (weights @ x).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(2.0**10)
    best = min(best, loss.item())
assert best < float("inf")
