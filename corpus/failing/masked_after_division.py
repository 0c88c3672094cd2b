"""Multiplying by a mask does not remove an infinity: inf * 0 is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, count):
        mean = x / count  # BAD
        return (mean * (count > 0)).sum()

    return program(loss, torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([4.0, 0.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(x, count):
        mean = x / count  # BAD
        return (mean * (count > 0)).sum()

    return program(loss, jnp.array([1.0, 2.0]), jnp.array([4.0, 0.0]))


CASE = Case(cause="domain", operation="div")
