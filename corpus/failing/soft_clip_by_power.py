"""x / (1 + |x|^p)^(1/p) with p learned, at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    p = torch.tensor(0.5, requires_grad=True)

    def loss(x):
        return (x / (1.0 + x.abs() ** p) ** (1.0 / p)).sum()  # BAD

    return program(loss, torch.tensor([0.0, 1.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(params):
        x, p = params
        return (x / (1.0 + jnp.abs(x) ** p) ** (1.0 / p)).sum()  # BAD

    return program(loss, (jnp.array([0.0, 1.0]), jnp.array(0.5)))


CASE = Case(cause="boundary_derivative", operation="pow")
