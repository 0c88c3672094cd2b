"""Masked attention inside a block that is recomputed in the backward pass."""

from corpus.case import program


def in_torch():
    import torch
    import torch.utils.checkpoint

    torch.manual_seed(0)
    projection = torch.nn.Linear(4, 4)

    def block(x):
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), diagonal=1)
        scores = (projection(x) @ x.transpose(-1, -2)).masked_fill(mask, float("-inf"))
        return torch.softmax(scores, dim=-1) @ x

    def loss(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).square().mean()

    return program(loss, torch.randn(2, 3, 4), model=projection)


def in_jax():
    import jax
    import jax.numpy as jnp

    @jax.checkpoint
    def block(w, x):
        mask = jnp.tril(jnp.ones((3, 3), dtype=bool))
        scores = jnp.where(mask, (x @ w) @ x.swapaxes(-1, -2), -jnp.inf)
        return jax.nn.softmax(scores, axis=-1) @ x

    def loss(w, x):
        return (block(w, x) ** 2).mean()

    return program(loss, 0.1 * jnp.eye(4), jnp.arange(24.0).reshape(2, 3, 4) / 24)
