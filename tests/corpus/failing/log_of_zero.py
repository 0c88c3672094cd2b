"""The logarithm of a probability that is exactly 0: the loss is inf."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(p):
        return -torch.log(p).mean()  # BAD

    return program(loss, torch.tensor([0.5, 0.0, 1.0], requires_grad=True))


def in_jax():
    def loss(p):
        return -jnp.log(p).mean()  # BAD

    return program(loss, jnp.array([0.5, 0.0, 1.0]))


CASE = Case(cause="domain", operation="log")
