"""The square root of 0 is 0, its slope there is infinite."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return torch.sqrt(x).sum()  # BAD

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return jnp.sqrt(x).sum()  # BAD

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause="boundary_derivative", operation="sqrt", primitive="div")
