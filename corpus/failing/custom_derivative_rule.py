"""A derivative rule for forward mode (custom_jvp) that divides by 0."""

from corpus.case import Case, program


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(x)

    @root.defjvp
    def derivative(primals, tangents):
        (x,), (t,) = primals, tangents
        y = jnp.sqrt(x)
        return y, t / (2.0 * y)  # BAD

    def loss(x):
        return root(x).sum()

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(
    cause=("domain", "boundary_derivative"),
    operation="div",
    only="jax",
    because="torch trains by reverse mode; custom_backward_divides is its counterpart",
)
