"""exp(-inf) is 0."""

from corpus.case import program


def in_torch():
    import torch

    def loss(x, keep):
        return torch.exp(x.masked_fill(~keep, float("-inf"))).sum()

    return program(loss, torch.ones(3, requires_grad=True), torch.tensor([True, False, True]))


def in_jax():
    import jax.numpy as jnp

    def loss(x, keep):
        return jnp.exp(jnp.where(keep, x, -jnp.inf)).sum()

    return program(loss, jnp.ones(3), jnp.array([True, False, True]))
