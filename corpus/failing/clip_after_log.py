"""clamp after log: the gradient is cut to 0, the slope behind it is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(p):
        logp = torch.log(p)  # BAD
        return -torch.clamp(logp, min=-100.0).sum()

    return program(loss, torch.tensor([0.5, 0.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(p):
        logp = jnp.log(p)  # BAD
        return -jnp.maximum(logp, -100.0).sum()

    return program(loss, jnp.array([0.5, 0.0]))


# Nothing selects another value, so it is no where-trap: the logarithm itself needs another argument.
CASE = Case(cause=("domain", "boundary_derivative"), operation="log", primitive="div")
