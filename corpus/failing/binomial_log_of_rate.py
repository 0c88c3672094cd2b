"""A log-likelihood whose rate, a clamped difference, is 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(a, k):
        rate = torch.clamp(a - 0.5, min=0.0)
        return -(k * rate.log() - rate).sum()  # BAD

    return program(loss, torch.tensor([1.0, 0.2], requires_grad=True), torch.tensor([2.0, 1.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(a, k):
        rate = jnp.clip(a - 0.5, 0.0)
        return -(k * jnp.log(rate) - rate).sum()  # BAD

    return program(loss, jnp.array([1.0, 0.2]), jnp.array([2.0, 1.0]))


CASE = Case(cause="domain", operation="log")
