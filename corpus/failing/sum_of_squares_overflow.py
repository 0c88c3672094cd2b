"""A weight penalty: the square of 1e20 overflows float32."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(w):
        squares = w * w  # BAD
        return squares.sum()

    return program(loss, torch.tensor([1.0, 1e20], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(w):
        squares = w * w  # BAD
        return squares.sum()

    return program(loss, jnp.array([1.0, 1e20]))


CASE = Case(cause="overflow", operation="mul")
