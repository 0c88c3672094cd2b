"""exp(x) / sum(exp(x)): inf / inf."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        e = torch.exp(x)  # BAD
        return (e / e.sum(-1, keepdim=True))[:, 0].sum()

    return program(loss, torch.tensor([[1.0, 2.0], [90.0, 3.0]], requires_grad=True))


def in_jax():
    def loss(x):
        e = jnp.exp(x)  # BAD
        return (e / e.sum(-1, keepdims=True))[:, 0].sum()

    return program(loss, jnp.array([[1.0, 2.0], [90.0, 3.0]]))


CASE = Case(cause="overflow", operation="exp")
