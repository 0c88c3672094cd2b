"""A hand-written GELU in float16: the cube of 50 overflows."""

from corpus.case import Case, program


def in_torch():
    import torch

    w = torch.ones(2, requires_grad=True)

    def loss(x):
        h = (w * x).half()
        inner = 0.8 * (h + 0.044715 * h**3)  # BAD
        return (0.5 * h * (1.0 + torch.tanh(inner))).float().sum() + inner.float().sum()

    return program(loss, torch.tensor([1.0, 50.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        h = (w * x).astype(jnp.float16)
        inner = 0.8 * (h + 0.044715 * h**3)  # BAD
        return (0.5 * h * (1.0 + jnp.tanh(inner))).astype(jnp.float32).sum() + inner.astype(jnp.float32).sum()

    return program(loss, jnp.ones(2), jnp.array([1.0, 50.0]))


CASE = Case(cause="low_precision_overflow", operation="pow")
