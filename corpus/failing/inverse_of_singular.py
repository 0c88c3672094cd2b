"""The inverse of a singular matrix: JAX returns inf."""

from corpus.case import Case, program


def in_jax():
    import jax.numpy as jnp

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
