"""The last batch of an epoch is empty; the mean of no losses is NaN."""

from corpus.case import Case, program


def in_torch():
    import torch

    linear = torch.nn.Linear(3, 1)

    def loss(x, y):
        error = linear(x).squeeze(-1) - y
        return (error**2).mean()  # BAD

    return program(loss, torch.zeros(0, 3), torch.zeros(0), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, y):
        error = x @ w - y
        return (error**2).mean()  # BAD

    return program(loss, jnp.ones(3), jnp.zeros((0, 3)), jnp.zeros(0))


CASE = Case(cause=("domain", "labels", "batch"), operation="mean", primitive={"jax": "div"})
