"""where(p > 0, log(p), 0) with p below 0: the logarithm that is not selected is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        logx = torch.log(1.0 - x)  # BAD
        return torch.where(x < 1, logx, torch.zeros_like(x)).sum()

    return program(loss, torch.tensor([0.5, 1.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        logx = jnp.log(1.0 - x)  # BAD
        return jnp.where(x < 1, logx, 0.0).sum()

    return program(loss, jnp.array([0.5, 1.0]))


CASE = Case(cause="where_trap", operation="log", primitive="div")
