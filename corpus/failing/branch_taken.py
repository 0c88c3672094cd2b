"""Only the branch that is taken fails."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(x):
        if x.sum() < 0.5:
            return torch.log(x).sum()  # BAD
        return x.sum()

    return program(loss, torch.tensor([0.0, 0.25], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(x):
        def small(x):
            return jnp.log(x).sum()  # BAD

        def large(x):
            return x.sum()

        return jax.lax.cond(x.sum() < 0.5, small, large, x)

    return program(loss, jnp.array([0.0, 0.25]))


CASE = Case(cause="domain", operation="log")
