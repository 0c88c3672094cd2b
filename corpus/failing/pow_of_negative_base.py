"""A fractional power of a negative number."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, target):
        error = x - target
        return (error**1.5).mean()  # BAD

    return program(loss, torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, 2.5]))


def in_jax():
    import jax.numpy as jnp

    def loss(x, target):
        error = x - target
        return (error**1.5).mean()  # BAD

    return program(loss, jnp.array([1.0, 2.0]), jnp.array([0.5, 2.5]))


CASE = Case(cause="domain", operation="pow")
