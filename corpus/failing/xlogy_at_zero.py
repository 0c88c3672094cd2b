"""x log(x) by xlogy: 0 at 0, but with a slope of -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(p):
        return torch.special.xlogy(p, p).sum()  # BAD

    return program(loss, torch.tensor([0.5, 0.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(p):
        return jax.scipy.special.xlogy(p, p).sum()  # BAD

    return program(loss, jnp.array([0.5, 0.0]))


CASE = Case(cause="boundary_derivative", operation="xlogy", primitive="div")
