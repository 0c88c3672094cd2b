"""A network for three classes does not learn: its head was replaced after the optimizer was made."""

import torch

torch.manual_seed(0)
points = torch.randn(600, 2)
labels = (points[:, 0] > 0).long() + (points[:, 1] > 0).long()

body = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU())
model = torch.nn.Sequential(body, torch.nn.Linear(32, 10))
body.requires_grad_(False)  # only the head is to be trained
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model[1] = torch.nn.Linear(32, 3)  # a new head, for three classes

for _ in range(200):
    batch = torch.randint(600, (64,))
    loss = torch.nn.functional.cross_entropy(model(points[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")
