"""A missing target was read as NaN."""

from corpus.case import Case, program


def in_torch():
    import torch
    from torch.nn import functional

    linear = torch.nn.Linear(2, 1)

    def loss(x, y):
        prediction = linear(x).squeeze(-1)
        return functional.mse_loss(prediction, y)  # BAD

    return program(loss, torch.ones(2, 2), torch.tensor([1.0, float("nan")]), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x, y):
        prediction = x @ w
        return ((prediction - y) ** 2).mean()  # BAD

    return program(loss, jnp.ones(2), jnp.ones((2, 2)), jnp.array([1.0, jnp.nan]))


CASE = Case(cause="batch", operation="input")
