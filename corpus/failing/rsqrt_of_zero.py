"""An RMS norm without eps, of a row of zeros."""

from corpus.case import Case, program


def in_torch():
    import torch

    weight = torch.ones(3, requires_grad=True)

    def loss(x):
        inverse = torch.rsqrt((x * x).mean(-1, keepdim=True))  # BAD
        return (x * inverse * weight).sum()

    return program(loss, torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(weight, x):
        inverse = jax.lax.rsqrt((x * x).mean(-1, keepdims=True))  # BAD
        return (x * inverse * weight).sum()

    return program(loss, jnp.ones(3), jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]))


CASE = Case(cause="domain", operation="rsqrt")
