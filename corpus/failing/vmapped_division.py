"""A function of one item, mapped over a batch one item of which divides by 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def ratio(x, y):
        return x / y  # BAD

    def loss(x, y):
        return torch.vmap(ratio)(x, y).sum()

    return program(loss, torch.ones(3, requires_grad=True), torch.tensor([1.0, 0.0, 2.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def ratio(x, y):
        return x / y  # BAD

    def loss(x, y):
        return jax.vmap(ratio)(x, y).sum()

    return program(loss, jnp.ones(3), jnp.array([1.0, 0.0, 2.0]))


CASE = Case(cause="domain", operation="div")
