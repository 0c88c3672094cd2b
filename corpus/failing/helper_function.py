"""The operation is in a helper; the line of the helper is the answer, not that of its caller."""

from corpus.case import Case, program


def in_torch():
    import torch

    def unit(x):
        total = x.sum(-1, keepdim=True)
        return x / total  # BAD

    def loss(x):
        p = unit(torch.relu(x))
        return (p * p).sum()

    return program(loss, torch.tensor([[1.0, 2.0], [-1.0, -2.0]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def unit(x):
        total = x.sum(-1, keepdims=True)
        return x / total  # BAD

    def loss(x):
        p = unit(jax.nn.relu(x))
        return (p * p).sum()

    return program(loss, jnp.array([[1.0, 2.0], [-1.0, -2.0]]))


CASE = Case(cause="domain", operation="div")
