"""log(1 + exp(x)) of 100."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        return torch.log(1.0 + torch.exp(x)).sum()  # BAD

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True))


def in_jax():
    def loss(x):
        return jnp.log(1.0 + jnp.exp(x)).sum()  # BAD

    return program(loss, jnp.array([1.0, 100.0]))


CASE = Case(cause="overflow", operation="exp")
