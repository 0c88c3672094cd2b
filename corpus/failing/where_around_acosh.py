"""Two branches of a profile, each undefined where the other is taken."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        inner = torch.acosh(1.0 / x)  # BAD
        return torch.where(x < 1.0, inner, torch.ones_like(x)).sum()

    return program(loss, torch.tensor([0.5, 2.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        inner = jnp.arccosh(1.0 / x)  # BAD
        return jnp.where(x < 1.0, inner, 1.0).sum()

    return program(loss, jnp.array([0.5, 2.0]))


CASE = Case(cause="where_trap", operation=("acosh", "sqrt", "log"), primitive="rsqrt")
