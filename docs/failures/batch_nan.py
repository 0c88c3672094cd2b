"""One broken pixel in the batch."""

import torch

import stablenum_torch

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2)
)
images = torch.rand(4, 1, 8, 8)
images[2, 0, 5, 5] = float("nan")
report = stablenum_torch.replay(lambda batch: model(batch).square().mean(), images, model=model)
print(report)
