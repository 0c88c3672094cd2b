"""Logits divided by a temperature of 1.2e-38: the quotient overflows float32."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, temperature):
        scaled = logits / temperature  # BAD
        return torch.softmax(scaled, dim=-1)[0]

    return program(loss, torch.tensor([1.0, 200.0], requires_grad=True), torch.tensor(1.2e-38))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, temperature):
        scaled = logits / temperature  # BAD
        return jax.nn.softmax(scaled)[0]

    return program(loss, jnp.array([1.0, 200.0]), jnp.array(1.2e-38))


CASE = Case(cause="overflow", operation="div")
