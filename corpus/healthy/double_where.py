"""log with `where` before it as well as after it."""

from corpus.case import program


def in_torch():
    import torch

    def loss(p):
        safe = torch.where(p > 0, p, torch.ones_like(p))
        return torch.where(p > 0, torch.log(safe), torch.zeros_like(p)).sum()

    return program(loss, torch.tensor([0.5, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(p):
        safe = jnp.where(p > 0, p, 1.0)
        return jnp.where(p > 0, jnp.log(safe), 0.0).sum()

    return program(loss, jnp.array([0.5, 0.0]))
