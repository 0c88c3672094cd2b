"""An RMS norm that replaces rows of zeros after it has divided."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        mean_square = (x * x).mean(-1, keepdim=True)
        inverse = torch.rsqrt(mean_square)  # BAD
        return torch.where(mean_square > 0, x * inverse, torch.zeros_like(x))[:, 0].sum()

    return program(loss, torch.tensor([[1.0, 2.0], [0.0, 0.0]], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        mean_square = (x * x).mean(-1, keepdims=True)
        inverse = jax.lax.rsqrt(mean_square)  # BAD
        return jnp.where(mean_square > 0, x * inverse, 0.0)[:, 0].sum()

    return program(loss, jnp.array([[1.0, 2.0], [0.0, 0.0]]))


CASE = Case(cause="where_trap", operation="rsqrt")
