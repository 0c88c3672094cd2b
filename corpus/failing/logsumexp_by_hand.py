"""log(sum(exp(x))) without subtracting the maximum."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.tensor([[3.0, 4.0], [1.0, 2.0]], requires_grad=True)

    def loss(x):
        scores = w @ x
        e = scores.exp()  # BAD
        return e.sum().log()

    return program(loss, torch.tensor([10.0, 20.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        scores = w @ x
        e = jnp.exp(scores)  # BAD
        return jnp.log(e.sum())

    return program(loss, jnp.array([[3.0, 4.0], [1.0, 2.0]]), jnp.array([10.0, 20.0]))


CASE = Case(cause="overflow", operation="exp")
