"""Functions with a kink or a pole whose library form has a subgradient: relu, abs, the norm in torch."""

from corpus.case import program


def in_torch():
    import torch

    def loss(x):
        return torch.relu(x).sum() + x.abs().sum() + torch.linalg.vector_norm(x) + x.std()

    return program(loss, torch.zeros(3, requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        return jax.nn.relu(x).sum() + jnp.abs(x).sum() + jnp.maximum(x, 0.0).max()

    return program(loss, jnp.zeros(3))
