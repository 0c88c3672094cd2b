"""A Hessian-vector product of a function with a square root at 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.zeros(2, requires_grad=True)

    def loss(x):
        y = torch.sqrt((w * w).sum() + 0.0)  # BAD
        (first,) = torch.autograd.grad(y, w, create_graph=True)
        return (first * x).sum()

    return program(loss, torch.ones(2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        def length(w):
            return jnp.sqrt((w * w).sum())  # BAD

        return (jax.grad(length)(w) * x).sum()

    return program(loss, jnp.zeros(2), jnp.ones(2))


CASE = Case(cause=("boundary_derivative", "domain"), operation="sqrt", primitive="div")
