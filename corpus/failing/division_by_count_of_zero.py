"""A masked mean over nothing: 0 / 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, mask):
        per_item = (x * x) * mask
        return per_item.sum() / mask.sum()  # BAD

    return program(loss, torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2))


def in_jax():
    import jax.numpy as jnp

    def loss(x, mask):
        per_item = (x * x) * mask
        return per_item.sum() / mask.sum()  # BAD

    return program(loss, jnp.array([1.0, 2.0]), jnp.zeros(2))


CASE = Case(cause=("domain", "labels"), operation="div")
