"""Inverse frequencies, of a class that never occurs."""

from corpus.case import Case, program


def in_torch():
    import torch

    counts = torch.tensor([4.0, 0.0, 2.0])

    def loss(scores):
        weight = counts.reciprocal()  # BAD
        return (scores * weight).sum()

    return program(loss, torch.ones(3, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    counts = jnp.array([4.0, 0.0, 2.0])

    def loss(scores):
        weight = jnp.reciprocal(counts)  # BAD
        return (scores * weight).sum()

    return program(loss, jnp.ones(3))


CASE = Case(cause="domain", operation=("reciprocal", "div"), primitive={"jax": "pow"})
