"""One row of an embedding table is NaN since an earlier update."""

from corpus.case import Case, program


def in_torch():
    import torch

    embedding = torch.nn.Embedding(4, 2)
    embedding.weight.data[2] = float("nan")

    def loss(ids):
        x = embedding(ids)  # BAD
        return x.square().mean()

    return program(loss, torch.tensor([0, 2]), model=embedding)


def in_jax():
    import jax.numpy as jnp

    def loss(table, ids):
        x = table[ids]  # BAD
        return (x**2).mean()

    return program(loss, jnp.ones((4, 2)).at[2].set(jnp.nan), jnp.array([0, 2]))


CASE = Case(cause="parameters", operation="parameter")
