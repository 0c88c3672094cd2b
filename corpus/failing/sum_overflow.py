"""Each square is finite, their sum is not."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(w):
        squares = w * w
        return squares.sum()  # BAD

    return program(loss, torch.full((10,), 1.5e19, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(w):
        squares = w * w
        return squares.sum()  # BAD

    return program(loss, jnp.full((10,), 1.5e19))


CASE = Case(cause="overflow", operation="sum")
