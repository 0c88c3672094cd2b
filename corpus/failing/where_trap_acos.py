"""where(|x| < 1, acos(x), 0) at 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        angle = torch.acos(x)  # BAD
        return torch.where(x.abs() < 1, angle, torch.zeros_like(x)).sum()

    return program(loss, torch.tensor([0.2, 1.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        angle = jnp.arccos(x)  # BAD
        return jnp.where(jnp.abs(x) < 1, angle, 0.0).sum()

    return program(loss, jnp.array([0.2, 1.0]))


CASE = Case(cause="where_trap", operation="acos", primitive="rsqrt")
