"""The length of a vector of zeros has no slope.

torch's own norm has a subgradient of 0, so in torch the norm is written by hand.
"""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return (x * x).sum(-1).sqrt().sum()  # BAD

    return program(loss, torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return jnp.linalg.norm(x, axis=-1).sum()  # BAD

    return program(loss, jnp.array([[3.0, 4.0], [0.0, 0.0]]))


CASE = Case(
    cause="boundary_derivative", operation={"torch": "sqrt", "jax": ("norm", "sqrt")}, primitive="div"
)
