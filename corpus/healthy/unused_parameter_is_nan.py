"""A head that this step does not use is NaN; loss and gradients do not depend on it."""

from corpus.case import program


def in_torch():
    import torch

    table = torch.full((3,), float("nan"))
    w = torch.ones(2, requires_grad=True)

    def loss(x):
        unused = table * 2.0
        return (w * x).sum() + 0.0 * unused.shape[0]

    return program(loss, torch.ones(2))


def in_jax():
    import jax.numpy as jnp

    table = jnp.full(3, jnp.nan)

    def loss(w, x):
        unused = table * 2.0
        return (w * x).sum() + 0.0 * unused.shape[0]

    return program(loss, jnp.ones(2), jnp.ones(2))
