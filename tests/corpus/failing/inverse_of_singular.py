"""The inverse of a singular matrix: JAX returns inf."""

import jax.numpy as jnp

from tests.corpus.case import Case, program


def in_jax():
    def loss(a):
        inverse = jnp.linalg.inv(a)  # BAD
        return jnp.trace(inverse)

    return program(loss, jnp.ones((2, 2)))


CASE = Case(
    cause="domain",
    operation=("inv", "solve", "triangular_solve"),
    only="jax",
    because="torch raises LinAlgError by itself",
)
