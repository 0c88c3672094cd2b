"""The log-determinant of a mixing matrix whose determinant has become negative."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(w):
        return -torch.logdet(w)  # BAD

    return program(loss, torch.tensor([[1.0, 0.0], [0.0, -1.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(w):
        return -jnp.log(jnp.linalg.det(w))  # BAD

    return program(loss, jnp.array([[1.0, 0.0], [0.0, -1.0]]))


CASE = Case(cause="domain", operation={"torch": "logdet", "jax": "log"}, primitive={"torch": "where"})
