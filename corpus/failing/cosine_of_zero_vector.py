"""A hand-written cosine similarity of a zero vector."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(a, b):
        lengths = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
        return (1.0 - (a * b).sum(-1) / lengths).mean()  # BAD

    a = torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True)
    return program(loss, a, torch.ones(2, 2))


def in_jax():
    import jax.numpy as jnp

    def loss(a, b):
        lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
        return (1.0 - (a * b).sum(-1) / lengths).mean()  # BAD

    return program(loss, jnp.array([[1.0, 2.0], [0.0, 0.0]]), jnp.ones((2, 2)))


CASE = Case(cause="domain", operation="div")
