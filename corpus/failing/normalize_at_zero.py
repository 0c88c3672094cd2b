"""A vector of zeros divided by its length."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        unit = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # BAD
        return (unit[0] * unit[1]).sum()

    return program(loss, torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # BAD
        return (unit[0] * unit[1]).sum()

    return program(loss, jnp.array([[3.0, 4.0], [0.0, 0.0]]))


CASE = Case(cause="domain", operation="div")
