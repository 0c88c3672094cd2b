"""The derivative of eigenvectors divides by the differences of eigenvalues."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(a):
        values, vectors = torch.linalg.eigh(a)  # BAD
        return (values * vectors[0]).sum()

    return program(loss, torch.eye(2, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(a):
        values, vectors = jnp.linalg.eigh(a)  # BAD
        return (values * vectors[0]).sum()

    return program(loss, jnp.eye(2))


CASE = Case(cause="boundary_derivative", operation="eigh", primitive={"torch": "div", "jax": "pow"})
