"""Weights divided by their sum, where all of a row are 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(w, x):
        w = torch.relu(w)
        w = w / w.sum(-1, keepdim=True)  # BAD
        return (w * x).sum()

    w = torch.tensor([[0.2, 0.3], [-1.0, -2.0]], requires_grad=True)
    return program(loss, w, torch.ones(2, 2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        w = jax.nn.relu(w)
        w = w / w.sum(-1, keepdims=True)  # BAD
        return (w * x).sum()

    return program(loss, jnp.array([[0.2, 0.3], [-1.0, -2.0]]), jnp.ones((2, 2)))


CASE = Case(cause="domain", operation="div")
