"""p * log(p / q) where p is 0: 0 * -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, p):
        q = torch.softmax(logits, dim=-1)
        return (p * torch.log(p / q)).sum()  # BAD

    return program(loss, torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([0.5, 0.5, 0.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, p):
        q = jax.nn.softmax(logits, axis=-1)
        return (p * jnp.log(p / q)).sum()  # BAD

    return program(loss, jnp.array([0.1, 0.2, 0.3]), jnp.array([0.5, 0.5, 0.0]))


CASE = Case(cause="domain", operation="log")
