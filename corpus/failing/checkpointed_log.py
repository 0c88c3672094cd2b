"""A logarithm of 0 in the forward pass of a block that is recomputed in the backward pass."""

from corpus.case import Case, program


def in_torch():
    import torch
    import torch.utils.checkpoint

    def block(x):
        return torch.log(x)  # BAD

    def loss(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum()

    return program(loss, torch.tensor([4.0, 0.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.checkpoint
    def block(x):
        return jnp.log(x)  # BAD

    def loss(x):
        return block(x).sum()

    return program(loss, jnp.array([4.0, 0.0]))


CASE = Case(cause="domain", operation="log")
