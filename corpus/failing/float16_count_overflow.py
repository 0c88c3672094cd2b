"""A hand-written mean in float16: the number of items, 100,000, overflows."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.ones(1, requires_grad=True)

    def loss(x):
        y = w.half() * x
        total = torch.ones_like(x).sum()  # BAD
        return (y / total).float().sum() + y.float().sum() * total.float() * 0.0

    return program(loss, torch.full((100_000,), 0.5, dtype=torch.float16))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        y = w.astype(jnp.float16) * x
        total = jnp.ones_like(x).sum()  # BAD
        return (y / total).astype(jnp.float32).sum() + y.sum().astype(jnp.float32) * total * 0.0

    return program(loss, jnp.ones(1), jnp.full((100_000,), 0.5, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="sum", primitive={"jax": "cast"})
