"""The log-determinant of a mixing matrix whose determinant has become negative."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(w):
        return -torch.logdet(w)  # BAD

    return program(loss, torch.tensor([[1.0, 0.0], [0.0, -1.0]], requires_grad=True))


def in_jax():
    def loss(w):
        return -jnp.log(jnp.linalg.det(w))  # BAD

    return program(loss, jnp.array([[1.0, 0.0], [0.0, -1.0]]))


CASE = Case(cause="domain", operation={"torch": "logdet", "jax": "log"})
