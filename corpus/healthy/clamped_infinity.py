"""An overflow in a quantity that is clamped right afterwards, outside the gradient."""

from corpus.case import program


def in_torch():
    import torch

    def loss(w, ratio):
        weight = torch.exp(ratio).clamp(max=10.0)
        return (w * weight).sum()

    return program(loss, torch.ones(2, requires_grad=True), torch.tensor([1.0, 200.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, ratio):
        weight = jnp.minimum(jnp.exp(ratio), 10.0)
        return (w * weight).sum()

    return program(loss, jnp.ones(2), jnp.array([1.0, 200.0]))
