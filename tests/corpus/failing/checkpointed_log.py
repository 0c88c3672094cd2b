"""A logarithm of 0 in the forward pass of a block that is recomputed in the backward pass."""

import jax
import jax.numpy as jnp
import torch
import torch.utils.checkpoint

from tests.corpus.case import Case, program


def in_torch():
    def block(x):
        return torch.log(x)  # BAD

    def loss(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    @jax.checkpoint
    def block(x):
        return jnp.log(x)  # BAD

    def loss(x):
        return block(x).sum()

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause="domain", operation="log")
