"""A gradient penalty: the norm of a gradient that is 0 is differentiated."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.zeros(2, requires_grad=True)

    def loss(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x * w).sum(), x, create_graph=True)
        norm = torch.sqrt((slope * slope).sum(-1))  # BAD
        return ((norm - 1.0) ** 2).mean()

    return program(loss, torch.ones(3, 2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        slope = jax.grad(lambda x: (x * w).sum())(x)
        norm = jnp.sqrt((slope * slope).sum(-1))  # BAD
        return ((norm - 1.0) ** 2).mean()

    return program(loss, jnp.zeros(2), jnp.ones((3, 2)))


CASE = Case(cause="boundary_derivative", operation="sqrt", primitive="div")
