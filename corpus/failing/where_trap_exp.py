"""A softplus with a `where` for large x: exp overflows where it is not used."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        e = torch.exp(x)  # BAD
        return torch.where(x > 20, x, torch.log1p(e)).sum()

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        e = jnp.exp(x)  # BAD
        return jnp.where(x > 20, x, jnp.log1p(e)).sum()

    return program(loss, jnp.array([1.0, 100.0]))


CASE = Case(cause="where_trap", operation="exp")
