"""The target class is masked: its log-probability is -inf, the loss inf."""

import jax.numpy as jnp
import optax
import torch
from torch.nn import functional

from tests.corpus.case import Case, program


def in_torch():
    def loss(logits, y):
        logits = logits.masked_fill(torch.tensor([False, True]), float("-inf"))  # BAD
        return functional.cross_entropy(logits, y)

    return program(loss, torch.tensor([[0.1, 0.2]], requires_grad=True), torch.tensor([1]))


def in_jax():
    def loss(logits, y):
        logits = jnp.where(jnp.array([False, True]), -jnp.inf, logits)  # BAD
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return program(loss, jnp.array([[0.1, 0.2]]), jnp.array([1]))


CASE = Case(cause="mask", operation={"torch": ("masked_fill", "where"), "jax": ("where", "constant")})
