"""A float mask of 0 and -inf comes with the batch."""

from corpus.case import program


def in_torch():
    import torch

    def loss(scores, mask):
        return torch.softmax(scores + mask, dim=-1)[:, 0].square().sum()

    mask = torch.tensor([[0.0, float("-inf"), 0.0], [0.0, 0.0, float("-inf")]])
    return program(loss, torch.ones(2, 3, requires_grad=True), mask)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, mask):
        return (jax.nn.softmax(scores + mask, axis=-1)[:, 0] ** 2).sum()

    mask = jnp.array([[0.0, -jnp.inf, 0.0], [0.0, 0.0, -jnp.inf]])
    return program(loss, jnp.ones((2, 3)), mask)
