"""A search begins with inf as the best loss so far."""

from corpus.case import program


def in_torch():
    import torch

    def loss(x, offsets):
        best = torch.tensor(float("inf"))
        for offset in offsets:
            best = torch.minimum(best, (x - offset).square().sum())
        return best

    return program(loss, torch.ones(2, requires_grad=True), torch.tensor([[0.0, 0.0], [1.0, 2.0]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x, offsets):
        def better(best, offset):
            return jnp.minimum(best, ((x - offset) ** 2).sum()), None

        return jax.lax.scan(better, jnp.inf, offsets)[0]

    return program(loss, jnp.ones(2), jnp.array([[0.0, 0.0], [1.0, 2.0]]))
