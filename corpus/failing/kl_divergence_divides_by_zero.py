"""p * log(p / q) where q underflowed to 0: p / q is inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, p):
        q = torch.softmax(logits, dim=-1)
        ratio = p / q  # BAD
        return (p * torch.log(ratio)).sum()

    return program(loss, torch.tensor([0.0, 150.0], requires_grad=True), torch.tensor([0.5, 0.5]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, p):
        q = jax.nn.softmax(logits, axis=-1)
        ratio = p / q  # BAD
        return (p * jnp.log(ratio)).sum()

    return program(loss, jnp.array([0.0, 150.0]), jnp.array([0.5, 0.5]))


CASE = Case(cause="domain", operation="div")
