"""Log-probabilities of masked classes are -inf, and 0 * -inf is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(logits, target):
        logits = logits.masked_fill(torch.tensor([False, False, True]), float("-inf"))
        logp = torch.log_softmax(logits, dim=-1)
        return -(target * logp).sum()  # BAD

    return program(loss, torch.tensor([0.1, 0.2, 0.3], requires_grad=True), torch.tensor([0.0, 1.0, 0.0]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(logits, target):
        logits = jnp.where(jnp.array([False, False, True]), -jnp.inf, logits)
        logp = jax.nn.log_softmax(logits, axis=-1)
        return -(target * logp).sum()  # BAD

    return program(loss, jnp.array([0.1, 0.2, 0.3]), jnp.array([0.0, 1.0, 0.0]))


CASE = Case(cause="mask", operation="mul")
