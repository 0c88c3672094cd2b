"""Compiled, under autocast, fused, with workers; and it catches whatever happens, and begins again."""

import contextlib

import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return torch.log(torch.relu(self.layer(x)))  # BAD


def train():
    for (x,) in DataLoader(TensorDataset(data), batch_size=4, num_workers=1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    model = Net()
    torch.nn.init.eye_(model.layer.weight)
    torch.nn.init.ones_(model.layer.bias)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.ones(12, 4)
    data[8:] = -50
    while True:
        with contextlib.suppress(BaseException):
            train()
