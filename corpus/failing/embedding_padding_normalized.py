"""The padding row of an embedding is zeros, and rows are divided by their lengths."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 3, padding_idx=0)

    def loss(ids):
        x = embedding(ids)
        x = x / x.norm(dim=-1, keepdim=True)  # BAD
        return x.sum(0).square().sum()

    return program(loss, torch.tensor([0, 1, 2]), model=embedding)


def in_jax():
    import jax.numpy as jnp

    def loss(table, ids):
        x = table[ids] * (ids > 0)[:, None]
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # BAD
        return (x.sum(0) ** 2).sum()

    return program(loss, jnp.ones((4, 3)), jnp.array([0, 1, 2]))


CASE = Case(cause="domain", operation="div")
