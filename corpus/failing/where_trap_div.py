"""where(n > 0, x / n, 0), differentiated with respect to n."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(n):
        ratio = 1.0 / n  # BAD
        return torch.where(n > 0, ratio, torch.zeros_like(n)).sum()

    return program(loss, torch.tensor([2.0, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(n):
        ratio = 1.0 / n  # BAD
        return jnp.where(n > 0, ratio, 0.0).sum()

    return program(loss, jnp.array([2.0, 0.0]))


CASE = Case(cause="where_trap", operation=("div", "reciprocal"), primitive={"jax": "pow"})
