"""A normal sample by the inverse error function, of a uniform number that rounded to 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    scale = torch.tensor(0.5, requires_grad=True)

    def loss(u):
        z = torch.erfinv(2.0 * u - 1.0)  # BAD
        return (scale * z).sum()

    return program(loss, torch.tensor([0.3, 1.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scale, u):
        z = jax.scipy.special.erfinv(2.0 * u - 1.0)  # BAD
        return (scale * z).sum()

    return program(loss, jnp.array(0.5), jnp.array([0.3, 1.0]))


CASE = Case(cause="domain", operation="erfinv")
