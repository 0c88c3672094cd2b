"""A token id beyond the table: JAX fills with NaN."""

from corpus.case import Case, program


def in_jax():
    import jax.numpy as jnp

    def loss(table, ids):
        x = jnp.take(table, ids, axis=0)  # BAD
        return (x**2).mean()

    return program(loss, jnp.ones((4, 2)), jnp.array([0, 7]))


CASE = Case(
    cause="labels",
    operation=("embedding", "gather", "take", "index"),
    only="jax",
    because="torch raises IndexError by itself",
)
