"""E[x^2] - E[x]^2 of large, nearly equal numbers cancels to below 0; its square root is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        var = (x * x).mean() - x.mean() ** 2 - 1e-5
        std = torch.sqrt(var)  # BAD
        return ((x - x.mean()) / std).sum()

    return program(loss, torch.full((4,), 100.0, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        var = (x * x).mean() - x.mean() ** 2 - 1e-5
        std = jnp.sqrt(var)  # BAD
        return ((x - x.mean()) / std).sum()

    return program(loss, jnp.full((4,), 100.0))


CASE = Case(cause="domain", operation="sqrt")
