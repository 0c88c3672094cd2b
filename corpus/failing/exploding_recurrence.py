"""A linear recurrence whose matrix is too large: the state overflows at some step."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = (20.0 * torch.eye(2)).requires_grad_()

    def loss(xs):
        h = torch.zeros(1, 2)
        for x in xs:
            h = torch.relu((h + x) @ w)  # BAD
        return h.sum()

    return program(loss, torch.ones(40, 1, 2))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, xs):
        def cell(h, x):
            h = jax.nn.relu((h + x) @ w)  # BAD
            return h, None

        h, _ = jax.lax.scan(cell, jnp.zeros((1, 2)), xs)
        return h.sum()

    return program(loss, 20.0 * jnp.eye(2), jnp.ones((40, 1, 2)))


CASE = Case(cause="overflow", operation="matmul", where="iteration 29 of scan")
