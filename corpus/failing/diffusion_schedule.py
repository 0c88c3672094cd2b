"""A noise schedule: sqrt of 1 - cumprod, which rounds below 0 at the last step."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(beta, x):
        kept = torch.cumprod(1.0 + beta, dim=0)
        noise = torch.sqrt(1.0 - kept)  # BAD
        return (noise * x).sum()

    return program(loss, torch.tensor([-0.1, 0.2], requires_grad=True), torch.ones(2))


def in_jax():
    import jax.numpy as jnp

    def loss(beta, x):
        kept = jnp.cumprod(1.0 + beta)
        noise = jnp.sqrt(1.0 - kept)  # BAD
        return (noise * x).sum()

    return program(loss, jnp.array([-0.1, 0.2]), jnp.ones(2))


CASE = Case(cause="domain", operation="sqrt")
