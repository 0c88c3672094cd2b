"""1 / (1 + exp(-x)) at -100: the value is 0 and right, its derivative is 0 * inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        e = torch.exp(-x)  # BAD
        return (1.0 / (1.0 + e)).sum()

    return program(loss, torch.tensor([0.5, -100.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        e = jnp.exp(-x)  # BAD
        return (1.0 / (1.0 + e)).sum()

    return program(loss, jnp.array([0.5, -100.0]))


CASE = Case(cause="overflow", operation="exp")
