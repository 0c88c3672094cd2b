"""Gumbel noise -log(-log(u)), of a uniform number that rounded to 1: the outer logarithm is of 0."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, u):
        inner = -torch.log(u)
        noise = -torch.log(inner)  # BAD
        return torch.softmax(logits + noise, dim=-1)[0]

    return program(loss, torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([0.5, 1.0, 0.9]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, u):
        inner = -jnp.log(u)
        noise = -jnp.log(inner)  # BAD
        return jax.nn.softmax(logits + noise)[0]

    return program(loss, jnp.array([0.1, 0.2, 0.3]), jnp.array([0.5, 1.0, 0.9]))


CASE = Case(cause="domain", operation="log")
