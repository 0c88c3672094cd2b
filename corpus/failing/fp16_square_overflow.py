"""300 squared overflows float16."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        square = x * x  # BAD
        return square.float().mean()

    return program(loss, torch.tensor([1.0, 300.0], dtype=torch.float16, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        square = x * x  # BAD
        return square.astype(jnp.float32).mean()

    return program(loss, jnp.array([1.0, 300.0], dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="mul")
