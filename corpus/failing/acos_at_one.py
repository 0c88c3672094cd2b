"""The angle between equal unit vectors is 0; acos has an infinite slope at 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(a, b):
        return torch.acos((a * b).sum(-1)).mean()  # BAD

    a = torch.tensor([[1.0, 0.0], [0.6, 0.8]], requires_grad=True)
    return program(loss, a, torch.tensor([[1.0, 0.0], [0.8, 0.6]]))


def in_jax():
    import jax.numpy as jnp

    def loss(a, b):
        return jnp.arccos((a * b).sum(-1)).mean()  # BAD

    return program(loss, jnp.array([[1.0, 0.0], [0.6, 0.8]]), jnp.array([[1.0, 0.0], [0.8, 0.6]]))


CASE = Case(cause="boundary_derivative", operation="acos", primitive="rsqrt")
