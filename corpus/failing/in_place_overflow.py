"""A sum that is accumulated in place exceeds float16 in the third iteration."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.ones(1, dtype=torch.float16, requires_grad=True)

    def loss(xs):
        total = torch.zeros(1, dtype=torch.float16)
        for x in xs:
            total += w * x  # BAD
        return total.float().sum()

    return program(loss, torch.full((4,), 30000.0, dtype=torch.float16))


def in_jax():
    import jax.numpy as jnp

    def loss(w, xs):
        total = jnp.zeros(1, dtype=jnp.float16)
        for x in xs:
            total += w * x  # BAD
        return total.astype(jnp.float32).sum()

    return program(loss, jnp.ones(1, dtype=jnp.float16), jnp.full((4,), 30000.0, dtype=jnp.float16))


CASE = Case(cause="low_precision_overflow", operation="add")
