"""softmax of a row that is fully masked: NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    def loss(scores, mask):
        scores = scores.masked_fill(~mask, float("-inf"))
        p = torch.softmax(scores, dim=-1)  # BAD
        return (p * p).sum()

    scores = torch.ones(2, 3, requires_grad=True)
    return program(loss, scores, torch.tensor([[True, True, False], [False, False, False]]))


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(scores, mask):
        scores = jnp.where(mask, scores, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)  # BAD
        return (p * p).sum()

    mask = jnp.array([[True, True, False], [False, False, False]])
    return program(loss, jnp.ones((2, 3)), mask)


CASE = Case(cause="mask", operation="softmax", primitive={"jax": "sub"})
