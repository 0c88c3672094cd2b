"""log(0) is -inf, but is not differentiated and not selected."""

from corpus.case import program


def in_torch():
    import torch

    def loss(w, counts):
        information = torch.log(counts)
        information = torch.where(counts > 0, information, torch.zeros_like(counts))
        return (w * information).sum()

    return program(loss, torch.ones(3, requires_grad=True), torch.tensor([2.0, 0.0, 5.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, counts):
        information = jnp.log(counts)
        information = jnp.where(counts > 0, information, 0.0)
        return (w * information).sum()

    return program(loss, jnp.ones(3), jnp.array([2.0, 0.0, 5.0]))
