"""The logarithm of an estimate that rounding, or the model, made negative."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.tensor([0.3, -0.2], requires_grad=True)

    def loss(x):
        rate = w * x
        return (rate - torch.log(rate)).sum()  # BAD

    return program(loss, torch.ones(2))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        rate = w * x
        return (rate - jnp.log(rate)).sum()  # BAD

    return program(loss, jnp.array([0.3, -0.2]), jnp.ones(2))


CASE = Case(cause="domain", operation="log")
