"""The derivative of eigenvectors divides by the differences of eigenvalues."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(a):
        values, vectors = torch.linalg.eigh(a)  # BAD
        return (values * vectors[0]).sum()

    return program(loss, torch.eye(2, requires_grad=True))


def in_jax():
    def loss(a):
        values, vectors = jnp.linalg.eigh(a)  # BAD
        return (values * vectors[0]).sum()

    return program(loss, jnp.eye(2))


CASE = Case(cause="boundary_derivative", operation="eigh")
