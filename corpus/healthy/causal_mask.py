"""Causal attention: half of the scores are -inf, no row is."""

from corpus.case import program


def in_torch():
    import torch

    torch.manual_seed(0)
    projection = torch.nn.Linear(4, 12)

    def loss(x):
        q, k, v = projection(x).chunk(3, dim=-1)
        mask = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(mask, float("-inf"))
        return (torch.softmax(scores, dim=-1) @ v).square().mean()

    return program(loss, torch.randn(2, 5, 4), model=projection)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        mask = jnp.tril(jnp.ones((5, 5), dtype=bool))
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -jnp.inf)
        return ((jax.nn.softmax(scores, axis=-1) @ v) ** 2).mean()

    return program(loss, 0.1 * jnp.ones((4, 12)), jnp.arange(40.0).reshape(2, 5, 4) / 40)
