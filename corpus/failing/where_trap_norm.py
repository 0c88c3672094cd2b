"""where(n > 0, x / n, x) with n the length of x: the square root below is still differentiated at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        n = (x * x).sum(-1, keepdim=True).sqrt()  # BAD
        n = n.masked_fill(n == 0, 1.0)
        return (x / n)[:, 0].sum()

    return program(loss, torch.tensor([[3.0, 4.0], [0.0, 0.0]], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        n = jnp.linalg.norm(x, axis=-1, keepdims=True)  # BAD
        n = jnp.where(n == 0, 1.0, n)
        return (x / n)[:, 0].sum()

    return program(loss, jnp.array([[3.0, 4.0], [0.0, 0.0]]))


CASE = Case(cause="where_trap", operation={"torch": "sqrt", "jax": ("norm", "sqrt")}, primitive="div")
