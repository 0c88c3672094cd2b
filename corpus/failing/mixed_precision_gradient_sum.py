"""A bfloat16 copy of parameters is fine; the float16 loss of a batch of 70,000 ones is not."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.ones(1, requires_grad=True)

    def loss(x):
        y = (w * x).half()
        return torch.sum(y)  # BAD

    return program(loss, torch.ones(70_000))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = (w * x).astype(jnp.float16)
        return jnp.sum(y)  # BAD

    return program(loss, jnp.ones(1), jnp.ones(70_000))


CASE = Case(cause="low_precision_overflow", operation="sum", primitive={"jax": "cast"})
