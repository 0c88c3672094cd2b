"""A label beyond the number of classes: JAX reads NaN in its place."""

from corpus.case import Case, program


def in_jax():
    import jax.numpy as jnp
    import optax

    def loss(w, x, y):
        logits = x @ w
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()  # BAD

    return program(loss, jnp.ones((2, 3)), jnp.ones((2, 2)), jnp.array([1, 3]))


CASE = Case(
    cause="labels",
    operation=("cross_entropy", "gather", "index"),
    only="jax",
    because="torch raises IndexError by itself",
)
