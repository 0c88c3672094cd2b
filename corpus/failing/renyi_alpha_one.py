"""A Renyi divergence at alpha = 1 divides by alpha - 1."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, alpha):
        p = torch.softmax(logits, dim=-1)
        return torch.log((p**alpha).sum()) / (1.0 - alpha)  # BAD

    return program(loss, torch.tensor([0.1, 0.2], requires_grad=True), torch.tensor(1.0))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, alpha):
        p = jax.nn.softmax(logits)
        return jnp.log((p**alpha).sum()) / (1.0 - alpha)  # BAD

    return program(loss, jnp.array([0.1, 0.2]), jnp.array(1.0))


CASE = Case(cause="domain", operation="div")
