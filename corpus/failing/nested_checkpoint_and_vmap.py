"""A checkpointed, vectorised function whose square root is at 0."""

from corpus.case import Case, program


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.checkpoint
    def length(x):
        return jnp.sqrt((x * x).sum())  # BAD

    @jax.jit
    def loss(xs):
        return jax.vmap(length)(xs).mean()

    return program(loss, jnp.array([[3.0, 4.0], [0.0, 0.0]]))


CASE = Case(
    cause="boundary_derivative",
    operation="sqrt",
    primitive={"jax": "div"},
    only="jax",
    because="torch.vmap has no checkpointing",
)
