"""The sum of 1000 numbers of 100 in float16."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        return x.sum()  # BAD

    return program(loss, torch.full((1000,), 100.0, dtype=torch.float16, requires_grad=True))


def in_jax():
    def loss(x):
        return x.sum()  # BAD

    return program(loss, jnp.full((1000,), 100.0, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="sum")
