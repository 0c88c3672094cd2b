"""Binary cross-entropy of a sigmoid that rounded to 1: (1 - y) * log(1 - p) is 0 * -inf."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, y):
        p = torch.sigmoid(logits)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # BAD

    return program(loss, torch.tensor([30.0, -1.0], requires_grad=True), torch.tensor([1.0, 0.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, y):
        p = jax.nn.sigmoid(logits)
        return -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).mean()  # BAD

    return program(loss, jnp.array([30.0, -1.0]), jnp.array([1.0, 0.0]))


CASE = Case(cause="domain", operation="log")
