"""The largest float32 rounds up to inf in bfloat16."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, keep):
        low = x.bfloat16()  # BAD
        return (low * keep.bfloat16()).float().sum()

    x = torch.tensor([1.0, 3.4028e38], requires_grad=True)
    return program(loss, x, torch.tensor([1.0, 0.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(x, keep):
        low = x.astype(jnp.bfloat16)  # BAD
        return (low * keep.astype(jnp.bfloat16)).astype(jnp.float32).sum()

    return program(loss, jnp.array([1.0, 3.4028e38]), jnp.array([1.0, 0.0]))


CASE = Case(cause="low_precision_overflow", operation=("cast", "to", "convert"))
