"""Hand-written attention in which every key is masked for every query."""

from corpus.case import Case, program


def in_torch():
    import torch

    torch.manual_seed(0)
    to_query = torch.nn.Linear(4, 4)

    def loss(x, keep):
        q, k, v = to_query(x), x, x
        scores = q @ k.transpose(-1, -2) / 2.0
        scores = scores.masked_fill(~keep[None, :].expand(3, 3), float("-inf"))
        return (torch.softmax(scores, dim=-1) @ v).square().mean()  # BAD

    return program(loss, torch.randn(3, 4), torch.zeros(3, dtype=torch.bool), model=to_query)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x, keep):
        q, k, v = x @ w, x, x
        scores = q @ k.T / 2.0
        scores = jnp.where(keep[None, :], scores, -jnp.inf)
        return ((jax.nn.softmax(scores, axis=-1) @ v) ** 2).mean()  # BAD

    return program(loss, jnp.eye(4), jnp.arange(12.0).reshape(3, 4) / 6, jnp.zeros(3, dtype=bool))


CASE = Case(cause="mask", operation="softmax", primitive={"jax": "sub"})
