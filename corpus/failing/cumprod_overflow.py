"""A product over 50 steps, each 10."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(rate):
        growth = torch.cumprod(1.0 + rate, dim=0)  # BAD
        return growth[-1]

    return program(loss, torch.full((50,), 9.0, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(rate):
        growth = jnp.cumprod(1.0 + rate, axis=0)  # BAD
        return growth[-1]

    return program(loss, jnp.full((50,), 9.0))


CASE = Case(cause="overflow", operation="cumprod", primitive={"jax": "mul"})
