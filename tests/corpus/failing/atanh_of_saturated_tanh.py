"""A squashed action inverted by atanh: tanh(20) is 1, and atanh(1) is inf."""

import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    def loss(mean):
        action = torch.tanh(mean)
        return (torch.atanh(action) - mean).square().sum()  # BAD

    return program(loss, torch.tensor([0.1, 20.0], requires_grad=True))


def in_jax():
    def loss(mean):
        action = jnp.tanh(mean)
        return ((jnp.arctanh(action) - mean) ** 2).sum()  # BAD

    return program(loss, jnp.array([0.1, 20.0]))


CASE = Case(cause="domain", operation="arctanh")
