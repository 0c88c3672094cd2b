"""log1p(-p) of a probability that rounded to 1: -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logit):
        p = torch.sigmoid(logit)
        return -torch.log1p(-p).mean()  # BAD

    return program(loss, torch.tensor([0.3, 40.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logit):
        p = jax.nn.sigmoid(logit)
        return -jnp.log1p(-p).mean()  # BAD

    return program(loss, jnp.array([0.3, 40.0]))


CASE = Case(cause="domain", operation="log1p")
