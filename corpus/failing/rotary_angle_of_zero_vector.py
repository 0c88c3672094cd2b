"""The angle between two vectors by acos of a quotient of lengths, one of them 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(a, b):
        cosine = (a * b).sum() / (a.norm() * b.norm())  # BAD
        return torch.acos(cosine)

    return program(loss, torch.zeros(3, requires_grad=True), torch.ones(3))


def in_jax():
    import jax.numpy as jnp

    def loss(a, b):
        cosine = (a * b).sum() / (jnp.linalg.norm(a) * jnp.linalg.norm(b))  # BAD
        return jnp.arccos(cosine)

    return program(loss, jnp.zeros(3), jnp.ones(3))


CASE = Case(cause="domain", operation="div")
