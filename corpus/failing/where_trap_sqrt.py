"""where(x > 0, sqrt(x), 0): the value is right, the derivative is 0 * inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        root = torch.sqrt(x)  # BAD
        return torch.where(x > 0, root, torch.zeros_like(x)).sum()

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        root = jnp.sqrt(x)  # BAD
        return jnp.where(x > 0, root, 0.0).sum()

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause="where_trap", operation="sqrt", primitive="div")
