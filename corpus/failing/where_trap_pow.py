"""where(x > 0, x ** 0.3, x) at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        power = x**0.3  # BAD
        return torch.where(x > 0, power, 0.1 * x).sum()

    return program(loss, torch.tensor([2.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        power = x**0.3  # BAD
        return jnp.where(x > 0, power, 0.1 * x).sum()

    return program(loss, jnp.array([2.0, 0.0]))


CASE = Case(cause="where_trap", operation="pow")
