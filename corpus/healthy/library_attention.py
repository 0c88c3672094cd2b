"""The library's attention with a boolean mask."""

from corpus.case import program


def in_torch():
    import torch
    from torch.nn import functional

    torch.manual_seed(0)
    projection = torch.nn.Linear(8, 24)

    def loss(x, keep):
        q, k, v = projection(x).chunk(3, dim=-1)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return out.square().mean()

    keep = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    return program(loss, torch.randn(1, 2, 4, 8), keep, model=projection)


def in_jax():
    import jax
    import jax.numpy as jnp

    def loss(w, x, keep):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        return (jax.nn.dot_product_attention(q, k, v, mask=keep) ** 2).mean()

    keep = jnp.tril(jnp.ones((1, 1, 4, 4), dtype=bool))
    return program(loss, 0.1 * jnp.ones((8, 24)), jnp.arange(64.0).reshape(1, 4, 2, 8) / 64, keep)
