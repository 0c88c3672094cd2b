"""The direction of a vector of zeros."""

from corpus.case import Case, program


def in_jax():
    import jax.numpy as jnp

    def loss(point):
        x, y = point
        return jnp.arctan2(y, x).sum()  # BAD

    return program(loss, (jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0])))


CASE = Case(
    cause="boundary_derivative",
    operation="atan2",
    primitive={"jax": "div"},
    only="jax",
    because="torch's derivative there is 0",
)
