"""The sum of 1000 numbers of 100 in float16."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return x.sum()  # BAD

    return program(loss, torch.full((1000,), 100.0, dtype=torch.float16, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return x.sum()  # BAD

    return program(loss, jnp.full((1000,), 100.0, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="sum", primitive={"jax": "cast"})
