"""A normal sample by the inverse error function, of a uniform number that rounded to 1."""

import jax
import jax.numpy as jnp
import torch

from tests.corpus.case import Case, program


def in_torch():
    scale = torch.tensor(0.5, requires_grad=True)

    def loss(u):
        z = torch.erfinv(2.0 * u - 1.0)  # BAD
        return (scale * z).sum()

    return program(loss, torch.tensor([0.3, 1.0]))


def in_jax():
    def loss(scale, u):
        z = jax.scipy.special.erfinv(2.0 * u - 1.0)  # BAD
        return (scale * z).sum()

    return program(loss, jnp.array(0.5), jnp.array([0.3, 1.0]))


CASE = Case(cause="domain", operation="erfinv")
