"""NaN in a column of the batch is replaced by 0 before it is used."""

from corpus.case import program


def in_torch():
    import torch

    linear = torch.nn.Linear(2, 1)

    def loss(x):
        return linear(torch.nan_to_num(x)).square().mean()

    return program(loss, torch.tensor([[1.0, float("nan")], [0.5, 2.0]]), model=linear)


def in_jax():
    import jax.numpy as jnp

    def loss(w, x):
        x = jnp.nan_to_num(x, posinf=0.0)
        return ((x @ w) ** 2).mean()

    return program(loss, jnp.ones(2), jnp.array([[1.0, jnp.nan], [jnp.inf, 2.0]]))
