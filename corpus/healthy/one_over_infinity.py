"""1 / inf is 0: a disabled penalty has an infinite width."""

from corpus.case import program


def in_torch():
    import torch

    def loss(w, width):
        return ((1.0 / width) * w.square()).sum()

    return program(loss, torch.ones(2, requires_grad=True), torch.tensor([2.0, float("inf")]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, width):
        return ((1.0 / width) * w**2).sum()

    return program(loss, jnp.ones(2), jnp.array([2.0, jnp.inf]))
