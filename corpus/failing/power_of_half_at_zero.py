"""|x| ** 0.5 at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return (x.abs() ** 0.5).sum()  # BAD

    return program(loss, torch.tensor([1.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return (jnp.abs(x) ** 0.5).sum()  # BAD

    return program(loss, jnp.array([1.0, 0.0]))


CASE = Case(cause="boundary_derivative", operation={"torch": "pow", "jax": ("pow", "sqrt")})
