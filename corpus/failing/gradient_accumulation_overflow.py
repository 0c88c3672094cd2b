"""Gradients of two losses are added up by the user and overflow."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.tensor([1.0], requires_grad=True)

    def loss(x):
        return (w * x).sum() + (w * x).sum()  # BAD

    return program(loss, torch.tensor([2.5e38]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        return (w * x).sum() + (w * x).sum()  # BAD

    return program(loss, jnp.array([1.0]), jnp.array([2.5e38]))


CASE = Case(cause="overflow", operation="add")
