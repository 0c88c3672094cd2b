"""The target class is masked: its log-probability is -inf, the loss inf."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    def loss(logits, y):
        logits = logits.masked_fill(torch.tensor([False, True]), float("-inf"))  # BAD
        return functional.cross_entropy(logits, y)

    return program(loss, torch.tensor([[0.1, 0.2]], requires_grad=True), torch.tensor([1]))


def in_jax():
    import jax.numpy as jnp
    import optax

    def loss(logits, y):
        logits = jnp.where(jnp.array([False, True]), -jnp.inf, logits)  # BAD
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return program(loss, jnp.array([[0.1, 0.2]]), jnp.array([1]))


CASE = Case(cause="mask", operation={"torch": ("masked_fill", "where"), "jax": ("where", "constant")})
