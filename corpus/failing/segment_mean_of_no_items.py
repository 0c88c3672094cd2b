"""A mean per group, of a group that no item belongs to."""

from corpus.case import Case, program


def in_torch():
    import torch

    group = torch.tensor([0, 0, 2])

    def loss(x):
        total = torch.zeros(3).index_add(0, group, x)
        count = torch.zeros(3).index_add(0, group, torch.ones(3))
        return (total / count).sum()  # BAD

    return program(loss, torch.tensor([1.0, 2.0, 3.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    group = jnp.array([0, 0, 2])

    def loss(x):
        total = jax.ops.segment_sum(x, group, num_segments=3)
        count = jax.ops.segment_sum(jnp.ones(3), group, num_segments=3)
        return (total / count).sum()  # BAD

    return program(loss, jnp.array([1.0, 2.0, 3.0]))


CASE = Case(cause="domain", operation="div")
