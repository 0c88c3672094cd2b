"""The maximum of a group with no members is -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x, group):
        start = torch.full((3,), float("-inf"))  # BAD
        return start.scatter_reduce(0, group, x, "amax").sum()

    return program(loss, torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0, 2]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x, group):
        return jax.ops.segment_max(x, group, num_segments=3).sum()  # BAD

    return program(loss, jnp.array([1.0, 2.0]), jnp.array([0, 2]))


CASE = Case(
    cause="mask",
    operation={"torch": ("full", "scatter"), "jax": ("scatter", "full", "constant", "segment_max")},
)
