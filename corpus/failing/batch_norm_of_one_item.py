"""A hand-written batch norm with the sample deviation, on a batch of one item."""

from corpus.case import Case, program


def in_torch():
    import torch

    gain = torch.ones(2, requires_grad=True)

    def loss(x):
        std = x.std(dim=0)  # BAD
        return (gain * (x - x.mean(dim=0)) / (std + 1e-5)).sum()

    return program(loss, torch.tensor([[1.0, 2.0]]))


def in_jax():
    import jax.numpy as jnp

    def loss(gain, x):
        std = x.std(axis=0, ddof=1)  # BAD
        return (gain * (x - x.mean(axis=0)) / (std + 1e-5)).sum()

    return program(loss, jnp.ones(2), jnp.array([[1.0, 2.0]]))


CASE = Case(cause="domain", operation=("std", "var"), primitive={"jax": "div"})
