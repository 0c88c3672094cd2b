"""A Cholesky factor of a matrix that is not positive definite: JAX returns NaN."""

import jax.numpy as jnp

from tests.corpus.case import Case, program


def in_jax():
    def loss(a):
        factor = jnp.linalg.cholesky(a)  # BAD
        return jnp.diag(factor).sum()

    return program(loss, jnp.array([[1.0, 2.0], [2.0, 1.0]]))


CASE = Case(cause="domain", operation="cholesky", only="jax", because="torch raises LinAlgError by itself")
