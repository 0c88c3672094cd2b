"""A mixture density: log of a sum of densities that all underflow to 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(mean, y):
        density = torch.exp(-0.5 * (y[:, None] - mean) ** 2).mean(-1)
        return -torch.log(density).mean()  # BAD

    return program(loss, torch.tensor([0.0, 1.0], requires_grad=True), torch.tensor([0.5, 40.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(mean, y):
        density = jnp.exp(-0.5 * (y[:, None] - mean) ** 2).mean(-1)
        return -jnp.log(density).mean()  # BAD

    return program(loss, jnp.array([0.0, 1.0]), jnp.array([0.5, 40.0]))


CASE = Case(cause="domain", operation="log")
