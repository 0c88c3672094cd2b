"""Every gradient is finite; the plain sum of their squares is not, and clipping by it makes them zeros."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.nn.Parameter(torch.ones(3))

    def loss(x):
        return (w * x).sum()

    return program(loss, torch.tensor([1e25, 2e25, 3e25]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        return (w * x).sum()

    return program(loss, jnp.ones(3), jnp.array([1e25, 2e25, 3e25]))


CASE = Case(cause="norm_overflow", operation="", fails="norm")
