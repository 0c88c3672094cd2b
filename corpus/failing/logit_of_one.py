"""The logit of a probability that is exactly 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(p):
        return torch.logit(p).sum()  # BAD

    return program(loss, torch.tensor([0.5, 1.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(p):
        return jax.scipy.special.logit(p).sum()  # BAD

    return program(loss, jnp.array([0.5, 1.0]))


CASE = Case(cause="domain", operation=("logit", "log", "div"))
