"""log(1 + exp(x)) of 100."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return torch.log(1.0 + torch.exp(x)).sum()  # BAD

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return jnp.log(1.0 + jnp.exp(x)).sum()  # BAD

    return program(loss, jnp.array([1.0, 100.0]))


CASE = Case(cause="overflow", operation="exp")
