"""A negative power of 0, as in inverse-distance weights: inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(d):
        weight = d**-2.0  # BAD
        return (weight / weight.sum()).max()

    return program(loss, torch.tensor([0.0, 1.0, 2.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(d):
        weight = d**-2.0  # BAD
        return (weight / weight.sum()).max()

    return program(loss, jnp.array([0.0, 1.0, 2.0]))


CASE = Case(cause="domain", operation="pow")
