"""A squashed action inverted by atanh: tanh(20) is 1, and atanh(1) is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(mean):
        action = torch.tanh(mean)
        return (torch.atanh(action) - mean).square().sum()  # BAD

    return program(loss, torch.tensor([0.1, 20.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(mean):
        action = jnp.tanh(mean)
        return ((jnp.arctanh(action) - mean) ** 2).sum()  # BAD

    return program(loss, jnp.array([0.1, 20.0]))


CASE = Case(cause="domain", operation="arctanh")
