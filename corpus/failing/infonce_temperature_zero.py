"""Similarities divided by a temperature of 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    temperature = torch.tensor(0.0, requires_grad=True)

    def loss(similarity):
        logits = similarity / temperature  # BAD
        return torch.nn.functional.cross_entropy(logits, torch.arange(2))

    return program(loss, torch.tensor([[0.9, 0.1], [0.2, 0.8]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(temperature, similarity):
        logits = similarity / temperature  # BAD
        return -jnp.diag(jax.nn.log_softmax(logits)).mean()

    return program(loss, jnp.array(0.0), jnp.array([[0.9, 0.1], [0.2, 0.8]]))


CASE = Case(cause="domain", operation="div")
