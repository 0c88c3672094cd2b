"""The log-determinant of a covariance that has lost a rank."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        covariance = x @ x.T
        return torch.logdet(covariance)  # BAD

    return program(loss, torch.tensor([[1.0, 1.0], [1.0, 1.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        covariance = x @ x.T
        return jnp.linalg.slogdet(covariance)[1]  # BAD

    return program(loss, jnp.ones((2, 2)))


CASE = Case(cause="domain", operation=("logdet", "slogdet", "log"), primitive={"torch": "where"})
