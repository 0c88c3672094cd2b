"""A bounded argument does not help asin: the value 1 itself has an infinite slope.

Since torch 2.14, ``clamp`` has gradient 0 at its bounds and hides that slope; ``minimum`` has 1/2 there.
"""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        return torch.asin(torch.minimum(x, torch.ones(()))).sum()  # BAD

    return program(loss, torch.tensor([0.5, 1.0], requires_grad=True))


def in_jax():
    import jax.numpy as jnp

    def loss(x):
        return jnp.arcsin(jnp.clip(x, -1.0, 1.0)).sum()  # BAD

    return program(loss, jnp.array([0.5, 1.0]))


CASE = Case(cause="boundary_derivative", operation="asin", primitive="rsqrt")
