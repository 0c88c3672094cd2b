"""A hand-written layer norm without eps, on a row whose elements are all equal."""

from corpus.case import Case, program


def in_torch():
    import torch

    gain = torch.ones(3, requires_grad=True)

    def loss(x):
        centred = x - x.mean(-1, keepdim=True)
        std = centred.square().mean(-1, keepdim=True).sqrt()
        return (gain * (centred / std)).sum()  # BAD

    return program(loss, torch.tensor([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]))


def in_jax():
    import jax.numpy as jnp

    def loss(gain, x):
        centred = x - x.mean(-1, keepdims=True)
        std = jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True))
        return (gain * (centred / std)).sum()  # BAD

    return program(loss, jnp.ones(3), jnp.array([[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]))


CASE = Case(cause="domain", operation="div")
