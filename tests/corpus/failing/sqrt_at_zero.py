"""The square root of 0 is 0, its slope there is infinite."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        return torch.sqrt(x).sum()  # BAD

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    def loss(x):
        return jnp.sqrt(x).sum()  # BAD

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause="boundary_derivative", operation="sqrt")
