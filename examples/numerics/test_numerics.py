"""Pin what one training step of the model computes."""

import torch
from model import Model, loss_fn

import stablenum_torch


def program():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(32, (2, 12))
    return stablenum_torch.program(
        lambda tokens: loss_fn(model, tokens), tokens, model=model, optimizer=optimizer
    )


def test_one_step(numerics):
    numerics.check(program(), "step")
