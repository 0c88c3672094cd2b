"""1e-8 is 0 in float16: the division that it should protect is by 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        eps = torch.tensor(1e-8, dtype=torch.float16)
        return (x / (x.abs().max() + eps)).float().sum()  # BAD

    return program(loss, torch.zeros(3, dtype=torch.float16, requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        eps = jnp.array(1e-8, dtype=jnp.float16)
        return (x / (jnp.abs(x).max() + eps)).astype(jnp.float32).sum()  # BAD

    return program(loss, jnp.zeros(3, dtype=jnp.float16))


CASE = Case(cause="domain", operation="div")
