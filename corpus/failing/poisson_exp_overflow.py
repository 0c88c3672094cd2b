"""A Poisson likelihood with a log-rate of 100: exp of it is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(log_rate, y):
        return (torch.exp(log_rate) - y * log_rate).mean()  # BAD

    return program(loss, torch.tensor([1.0, 100.0], requires_grad=True), torch.tensor([2.0, 3.0]))


def in_jax():
    import jax.numpy as jnp

    def loss(log_rate, y):
        return (jnp.exp(log_rate) - y * log_rate).mean()  # BAD

    return program(loss, jnp.array([1.0, 100.0]), jnp.array([2.0, 3.0]))


CASE = Case(cause="overflow", operation="exp")
