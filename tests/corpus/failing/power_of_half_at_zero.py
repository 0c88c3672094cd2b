"""|x| ** 0.5 at 0."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        return (x.abs() ** 0.5).sum()  # BAD

    return program(loss, torch.tensor([1.0, 0.0], requires_grad=True))


def in_jax():
    def loss(x):
        return (jnp.abs(x) ** 0.5).sum()  # BAD

    return program(loss, jnp.array([1.0, 0.0]))


CASE = Case(cause="boundary_derivative", operation={"torch": "pow", "jax": ("pow", "sqrt")})
