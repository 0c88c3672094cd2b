"""The library's KL divergence, given the logarithm of a softmax that underflowed to 0."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(logits, target):
        logq = torch.log(torch.softmax(logits, dim=-1))  # BAD
        return functional.kl_div(logq, target, reduction="sum")

    return program(loss, torch.tensor([0.0, 150.0], requires_grad=True), torch.tensor([0.5, 0.5]))


def in_jax():
    import jax
    import jax.numpy as jnp
    import optax

    def loss(logits, target):
        logq = jnp.log(jax.nn.softmax(logits))  # BAD
        return optax.losses.kl_divergence(logq, target)

    return program(loss, jnp.array([0.0, 150.0]), jnp.array([0.5, 0.5]))


CASE = Case(cause="domain", operation="log")
