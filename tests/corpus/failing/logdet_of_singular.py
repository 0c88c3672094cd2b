"""The log-determinant of a covariance that has lost a rank."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(x):
        covariance = x @ x.T
        return torch.logdet(covariance)  # BAD

    return program(loss, torch.tensor([[1.0, 1.0], [1.0, 1.0]], requires_grad=True))


def in_jax():
    def loss(x):
        covariance = x @ x.T
        return jnp.linalg.slogdet(covariance)[1]  # BAD

    return program(loss, jnp.ones((2, 2)))


CASE = Case(cause="domain", operation=("logdet", "slogdet", "log"))
