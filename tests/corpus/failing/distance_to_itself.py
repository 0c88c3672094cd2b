"""All pairwise distances, the diagonal among them."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        difference = x[:, None] - x[None, :]
        distance = difference.square().sum(-1).sqrt()  # BAD
        return distance.mean()

    return program(loss, torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True))


def in_jax():
    def loss(x):
        difference = x[:, None] - x[None, :]
        distance = jnp.sqrt((difference**2).sum(-1))  # BAD
        return distance.mean()

    return program(loss, jnp.array([[0.0, 1.0], [2.0, 3.0]]))


CASE = Case(cause="boundary_derivative", operation="sqrt")
