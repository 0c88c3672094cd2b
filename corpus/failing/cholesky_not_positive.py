"""A Cholesky factor of a matrix that is not positive definite: JAX returns NaN."""

from corpus.case import Case, program


def in_jax():
    import jax.numpy as jnp

    def loss(a):
        factor = jnp.linalg.cholesky(a)  # BAD
        return jnp.diag(factor).sum()

    return program(loss, jnp.array([[1.0, 2.0], [2.0, 1.0]]))


CASE = Case(cause="domain", operation="cholesky", only="jax", because="torch raises LinAlgError by itself")
