"""A masked max pooling over time: one item of the batch is only padding."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 2)

    def loss(x, keep):
        h = linear(x).masked_fill(~keep[..., None], float("-inf"))  # BAD
        return h.amax(1).sum()

    return program(loss, torch.ones(2, 3, 2), torch.tensor([[True, True, False], [False] * 3]), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, keep):
        h = jnp.where(keep[..., None], x @ w, -jnp.inf)  # BAD
        return h.max(1).sum()

    return program(loss, jnp.ones((2, 2)), jnp.ones((2, 3, 2)), jnp.array([[True, True, False], [False] * 3]))


CASE = Case(cause="mask", operation=("masked_fill", "where", "constant"))
