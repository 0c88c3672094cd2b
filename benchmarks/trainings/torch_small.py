"""Train a small network in PyTorch; print the milliseconds of a step. The arguments: optimizer and steps."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

INPUTS, WIDTH, ROWS, BATCH, BLOCK = 32, 96, 8192, 256, 10
RATES = {"sgd": 1e-2, "adam": 1e-3}


def main(name: str, steps: int) -> None:
    """Train, and print the time of a step in the fastest block after the first quarter."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    made = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    optimizer = made(model.parameters(), lr=RATES[name])
    inputs = torch.randn(ROWS, INPUTS)
    targets = inputs.sum(1, keepdim=True).sin()
    blocks = []
    for block in range(steps // BLOCK):
        begin = time.perf_counter()
        for step in range(BLOCK):
            at = (block * BLOCK + step) * BATCH % ROWS
            loss = nn.functional.mse_loss(model(inputs[at : at + BATCH]), targets[at : at + BATCH])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss.item()
        blocks.append((time.perf_counter() - begin) / BLOCK)
    print(1e3 * min(blocks[len(blocks) // 4 :]))


main(sys.argv[1], int(sys.argv[2]))
