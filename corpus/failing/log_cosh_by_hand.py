"""The log-cosh loss of an error of 100: cosh is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(prediction, y):
        return torch.log(torch.cosh(prediction - y)).mean()  # BAD

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True), torch.zeros(2))


def in_jax():
    import jax.numpy as jnp

    def loss(prediction, y):
        return jnp.log(jnp.cosh(prediction - y)).mean()  # BAD

    return program(loss, jnp.array([1.0, 100.0]), jnp.zeros(2))


CASE = Case(cause="overflow", operation="cosh")
