"""The logarithm of a probability that is exactly 0: the loss is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(p):
        return -torch.log(p).mean()  # BAD

    return program(loss, torch.tensor([0.5, 0.0, 1.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(p):
        return -jnp.log(p).mean()  # BAD

    return program(loss, jnp.array([0.5, 0.0, 1.0]))


CASE = Case(cause="domain", operation="log")
