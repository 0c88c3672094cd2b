"""p * log(p) at 0: 0 * -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(w):
        p = torch.relu(w)
        return -(p * torch.log(p)).sum()  # BAD

    return program(loss, torch.tensor([0.7, 0.3, -0.1], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w):
        p = jax.nn.relu(w)
        return -(p * jnp.log(p)).sum()  # BAD

    return program(loss, jnp.array([0.7, 0.3, -0.1]))


CASE = Case(cause="domain", operation="log")
