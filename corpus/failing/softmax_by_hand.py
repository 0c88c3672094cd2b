"""exp(x) / sum(exp(x)): inf / inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        e = torch.exp(x)  # BAD
        return (e / e.sum(-1, keepdim=True))[:, 0].sum()

    return program(loss, torch.tensor([[1.0, 2.0], [90.0, 3.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        e = jnp.exp(x)  # BAD
        return (e / e.sum(-1, keepdims=True))[:, 0].sum()

    return program(loss, jnp.array([[1.0, 2.0], [90.0, 3.0]]))


CASE = Case(cause="overflow", operation="exp")
