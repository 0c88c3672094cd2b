"""A focal loss with gamma below 1: (1 - p) ** 0.5 has no slope where p is 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits):
        p = torch.sigmoid(logits)
        weight = (1.0 - p) ** 0.7  # BAD
        return -(weight * torch.nn.functional.logsigmoid(logits)).mean()

    return program(loss, torch.tensor([0.2, 40.0], requires_grad=True))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits):
        p = jax.nn.sigmoid(logits)
        weight = (1.0 - p) ** 0.7  # BAD
        return -(weight * jax.nn.log_sigmoid(logits)).mean()

    return program(loss, jnp.array([0.2, 40.0]))


CASE = Case(cause="boundary_derivative", operation="pow")
