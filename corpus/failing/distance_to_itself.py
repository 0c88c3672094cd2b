"""All pairwise distances, the diagonal among them."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        difference = x[:, None] - x[None, :]
        distance = difference.square().sum(-1).sqrt()  # BAD
        return distance.mean()

    return program(loss, torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        difference = x[:, None] - x[None, :]
        distance = jnp.sqrt((difference**2).sum(-1))  # BAD
        return distance.mean()

    return program(loss, jnp.array([[0.0, 1.0], [2.0, 3.0]]))


CASE = Case(cause="boundary_derivative", operation="sqrt", primitive="div")
