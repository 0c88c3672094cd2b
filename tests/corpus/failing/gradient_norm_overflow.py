"""Every gradient is finite; the plain sum of their squares is not, and clipping by it makes them zeros."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    w = torch.nn.Parameter(torch.ones(3))

    def loss(x):
        return (w * x).sum()

    return program(loss, torch.tensor([1e25, 2e25, 3e25]))


def in_jax():
    def loss(w, x):
        return (w * x).sum()

    return program(loss, jnp.ones(3), jnp.array([1e25, 2e25, 3e25]))


CASE = Case(cause="norm_overflow", operation="", fails="norm")
