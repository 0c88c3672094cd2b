"""An embedding that renormalises its rows in place, a row of zeros among them."""

from corpus.case import program


def in_torch():
    import torch

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 3, padding_idx=0, max_norm=1.0)

    def loss(ids):
        return embedding(ids).square().mean()

    return program(loss, torch.tensor([0, 1, 3]), model=embedding)


def in_jax():
    import jax.numpy as jnp

    def loss(table, ids):
        rows = table[ids]
        squares = (rows**2).sum(-1, keepdims=True)
        length = jnp.sqrt(jnp.where(squares > 0, squares, 1.0))
        return ((rows / jnp.maximum(length, 1.0)) ** 2).mean()

    return program(loss, jnp.ones((4, 3)).at[0].set(0.0), jnp.array([0, 1, 3]))
