"""where(p > 0, log(p), 0): the logarithm is still computed at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(p):
        logp = torch.log(p)  # BAD
        return -torch.where(p > 0, logp, torch.zeros_like(p)).sum()

    return program(loss, torch.tensor([0.5, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(p):
        logp = jnp.log(p)  # BAD
        return -jnp.where(p > 0, logp, 0.0).sum()

    return program(loss, jnp.array([0.5, 0.0]))


CASE = Case(cause="where_trap", operation="log", primitive="div")
