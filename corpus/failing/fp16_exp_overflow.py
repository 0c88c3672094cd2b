"""exp(12) overflows float16."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        e = torch.exp(x)  # BAD
        return torch.log(e.float().sum())

    return program(loss, torch.tensor([1.0, 12.0], dtype=torch.float16, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        e = jnp.exp(x)  # BAD
        return jnp.log(e.astype(jnp.float32).sum())

    return program(loss, jnp.array([1.0, 12.0], dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="exp")
